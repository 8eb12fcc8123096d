"""FLOPs against torch's counter, the roofline by hand, and how sharding divides work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.processor_seconds import processor_seconds
from support.models.handwritten_blocks import Builder, gpt2_block, llama_block
from support.plans.handwritten_candidates import block_plan
from support.plans.mesh import mesh_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost_models.compute.kernels import product_seconds
from autopar.cost_models.compute.operations import node_cost, profile
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.tensors.observe_saves import _function
from autopar.ir.graph import Block
from autopar.ir.placement import Invariant, Partial, Replicate, Shard
from autopar.ir.plan import NodePlan

R, I, P = Replicate(), Invariant(), Partial()  # noqa: E741


def single(
    op: str, result: tuple[Any, ...], *operands: tuple[Any, ...], rest: tuple[Any, ...] = (), frozen: int = -1, **kw: Any
) -> Block:
    """A block of one operation on parameters."""
    b = Builder("One")
    refs = [b.parameter(f"p{i}", shape, trainable=i != frozen) for i, shape in enumerate(operands)]
    return b.block(b.op(op, *refs, *rest, shape=result, name="out", **kw))  # type: ignore[arg-type]


CASES = [
    ("aten.linear", (4, 16, 32), ((4, 16, 64), (32, 64), (32,)), ()),
    ("ap.linear_kn", (4, 16, 32), ((4, 16, 64), (64, 32)), ()),
    ("aten.mm", (4, 16), ((4, 8), (8, 16)), ()),
    ("aten.bmm", (3, 4, 16), ((3, 4, 8), (3, 8, 16)), ()),
    ("aten.addmm", (4, 16), ((16,), (4, 8), (8, 16)), ()),
    ("aten.conv2d", (2, 8, 7, 7), ((2, 6, 16, 16), (8, 6, 3, 3), (8,)), ((2, 2),)),
    ("aten.conv2d", (2, 8, 16, 16), ((2, 6, 16, 16), (8, 3, 3, 3)), (None, (1, 1), (1, 1), (1, 1), 2)),
    ("aten.scaled_dot_product_attention", (2, 4, 16, 8), ((2, 4, 16, 8), (2, 4, 12, 8), (2, 4, 12, 8)), ()),
]


@pytest.mark.parametrize(("op", "result", "operands", "rest"), CASES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("frozen", [-1, 0])
def test_flops_as_torch_counts_them(op: str, result: Any, operands: Any, rest: Any, frozen: int) -> None:
    if frozen == 0 and "attention" in op:
        pytest.skip("attention computes all three gradients at once")
    frozen = 1 if frozen == 0 and op == "aten.addmm" else frozen
    block = single(op, result, *operands, rest=rest, frozen=frozen)
    known = profile(block.nodes[0], block.values(), 1)
    tensors = [torch.empty(shape, device="meta", requires_grad=i != frozen) for i, shape in enumerate(operands)]
    if "attention" in op:  # a head size that flash attention takes, on the backend that the counter knows
        with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(*tensors)
        assert known.forward_flops == counter.get_total_flops()
        assert known.backward_flops == 2.5 * known.forward_flops and known.model_flops == 3 * known.forward_flops
        return
    with FlopCounterMode(display=False) as counter:
        out = _function(op)(*tensors, *rest)
    assert known.forward_flops == counter.get_total_flops() > 0
    if rest[-1:] == (2,):
        return  # torch's counter forgets the groups in the gradient of the weight
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert known.backward_flops == counter.get_total_flops()


def test_causal_attention_is_half() -> None:
    shapes = ((2, 4, 16, 8),) * 3
    full = profile((b := single("aten.scaled_dot_product_attention", shapes[0], *shapes)).nodes[0], b.values(), 1)
    b = single("aten.scaled_dot_product_attention", shapes[0], *shapes, rest=(None, 0.0, True))
    assert profile(b.nodes[0], b.values(), 1).forward_flops == full.forward_flops / 2 == 2 * 2 * 4 * 16 * 16 * 8


def mm_cost(m: int, k: int, n: int, *placements: Any, mesh: Any = None, dtype: str = "float32") -> Any:
    """A product ``[m, k] x [k, n]`` on one H100 node; without placements every rank does all of it."""
    b = Builder("One", dtype)
    refs = [b.parameter("p0", (m, k)), b.parameter("p1", (k, n))]
    block = b.block(b.op("aten.mm", *refs, shape=(m, n), name="out"))  # type: ignore[arg-type]
    placements = placements or ((I, I),) * 3
    plan = NodePlan("out", placements[:2], placements[2:], ("", ""))
    return node_cost(block.nodes[0], block.values(), plan, mesh or mesh_of(dp=1, tp=8), 1, Cluster.parse("dgx-h100:1"))


def test_roofline_by_hand() -> None:
    """A large product is bound by FLOPs (at the efficiency of its shape), a tall thin one by memory, a tiny one by the launch."""
    device = Cluster.parse("dgx-h100:1").device
    peak = device.peak_flops_per_second("float32") * device.matmul_fraction
    large = mm_cost(8192, 8192, 8192).forward_seconds
    assert large == pytest.approx(product_seconds(device, "float32", 1, 8192, 8192, 8192))
    assert 2 * 8192**3 / peak < large < 1.1 * 2 * 8192**3 / peak
    rate = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    assert mm_cost(2**22, 8, 8).forward_seconds >= 4 * (2 * 2**22 * 8 + 64) / rate
    assert mm_cost(8, 8, 8).forward_seconds == device.launch_seconds
    b = Builder("Stream")
    block = b.block(b.op("aten.tanh", b.parameter("x", (4096, 4096)), shape=(4096, 4096), name="out"))  # type: ignore[arg-type]
    plan = NodePlan("out", ((I, I),), ((I, I),), ("redundant",) * 2)
    found = node_cost(block.nodes[0], block.values(), plan, mesh_of(dp=1, tp=8), 1, Cluster.parse("dgx-h100:1"))
    assert found.forward_seconds == pytest.approx(4 * 2 * 4096**2 / rate)  # read once, written once
    assert found.backward_seconds == pytest.approx(4 * 3 * 4096**2 / rate)  # the result, its gradient, the operand's


def test_shards_divide_work_and_traffic() -> None:
    """Each rank has the product of its own shape: an eighth of the FLOPs, in no less than an eighth of the time."""
    mesh, device = mesh_of(dp=2, tp=4), Cluster.parse("dgx-h100:1").device

    def cost(*placements: Any) -> Any:
        return mm_cost(4096, 4096, 4096, *placements, mesh=mesh)

    whole = cost((I, I), (I, I), (I, I))
    column = cost((Shard(0), R), (R, Shard(1)), (Shard(0), Shard(1)))
    row = cost((Shard(0), Shard(1)), (R, Shard(0)), (Shard(0), P))
    handed_on = cost((P, P), (R, R), (P, P))
    assert column.forward_flops == row.forward_flops == whole.forward_flops / 8
    assert column.forward_seconds == pytest.approx(product_seconds(device, "float32", 1, 2048, 1024, 4096))
    assert row.forward_seconds == pytest.approx(product_seconds(device, "float32", 1, 2048, 4096, 1024))
    assert min(column.forward_seconds, row.forward_seconds) >= whole.forward_seconds / 8
    assert column.backward_flops == 2 * column.forward_flops
    assert handed_on.forward_flops == whole.forward_flops


def test_the_backward_of_a_product_is_its_two_products() -> None:
    """Gradient of the left operand ``[m, n] x [n, k]``, of the right one ``[k, m] x [m, n]``."""
    device = Cluster.parse("dgx-h100:1").device
    m, k, n = 8192, 2048, 4096  # more arithmetic than memory traffic
    both = product_seconds(device, "bfloat16", 1, m, k, n) + product_seconds(device, "bfloat16", 1, k, n, m)
    assert mm_cost(m, k, n, dtype="bfloat16").backward_seconds == pytest.approx(both)


def test_views_are_free_and_sums_hand_their_gradient_on() -> None:
    b = Builder("Views")
    x = b.parameter("x", (1024, 1024))
    y = b.op("aten.transpose.int", x, 0, 1, shape=(1024, 1024), name="t")
    z = b.op("aten.add.Tensor", x, y, shape=(1024, 1024), name="z")
    block = b.block(z)  # type: ignore[arg-type]
    costs = BlockCosts(block, mesh_of(dp=1, tp=8), 1, Cluster.parse("dgx-h100:1"))
    view = costs.node(NodePlan("t", ((I, I),), ((I, I),), ("redundant",) * 2))
    assert view.seconds == 0
    total = costs.node(NodePlan("z", ((I, I),) * 2, ((I, I),), ("redundant",) * 2))
    assert total.forward_seconds > 0 and total.backward_seconds == 0


class _Traffic(TorchDispatchMode):
    """The bytes that operations read and write, and their number, without views and small results."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least_bytes, self.size_bytes, self.kernels = least_bytes, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(each.alias_info for each in func._schema.returns) and tree_leaves(result)[0].nbytes >= self.least_bytes:
            self.size_bytes += sum(each.nbytes for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor))
            self.kernels += 1
        return result


@pytest.mark.parametrize("layout", ["halves", "interleaved", "interleaved to halves"])
def test_operations_of_several_kernels_say_so(layout: str) -> None:
    """Their eager forward and backward as torch dispatches them."""
    shapes = (4, 8, 16, 32), (1, 1, 16, 32), (1, 1, 16, 32)
    b = Builder("One")
    refs = [b.parameter(f"p{i}", shape, trainable=i == 0) for i, shape in enumerate(shapes)]
    block = b.block(b.op("ap.rotary_embedding", *refs, layout, shape=shapes[0], name="out"))
    known = profile(block.nodes[0], block.values(), 1)
    x, *tables = (torch.rand(shape) for shape in shapes)
    x.requires_grad_()
    with _Traffic(x.nbytes // 2) as forward:
        result = _function("ap.rotary_embedding")(x, *tables, layout)
    gradient = torch.rand_like(result)
    with _Traffic(x.nbytes // 2) as backward:
        torch.autograd.grad(result, x, gradient)
    for traffic, kernels, sides in (
        (forward, known.kernels[0], (known.forward_operands, known.forward_results)),
        (backward, known.kernels[1], (known.backward_operands, known.backward_results)),
    ):
        sizes = zip((known.operand_bytes, known.result_bytes), sides, strict=True)
        predicted = sum(each * times for size_bytes, counts in sizes for each, times in zip(size_bytes, counts, strict=True))
        assert predicted == pytest.approx(traffic.size_bytes, rel=0.2)
        assert traffic.kernels == pytest.approx(kernels, abs=1)


def test_frozen_and_no_grad_have_no_backward() -> None:
    b = Builder("Frozen")
    x, w = b.parameter("x", (64, 64), trainable=False), b.parameter("w", (64, 64), trainable=False)
    block = b.block(b.op("aten.mm", x, w, shape=(64, 64), name="out"))  # type: ignore[arg-type]
    known = profile(block.nodes[0], block.values(), 1)
    assert known.backward_flops == 0 and not any(known.backward_operands) and known.model_flops == known.forward_flops


def test_vocabulary_parallel_loss_communicates_on_its_axis() -> None:
    from support.models.handwritten_blocks import loss_block

    block, cluster, mesh = loss_block(dtype="bfloat16"), Cluster.parse("dgx-h100:1"), mesh_of(dp=2, tp=4)
    plan = block_plan(block, mesh, 0, {"tp": {"logits": "n"}}, True, 8)
    costs = BlockCosts(block, mesh, 8, cluster)
    (loss,) = [costs.node(node) for node in plan.nodes if node.function]
    assert loss.forward_comm_seconds[0] == 0 < loss.forward_comm_seconds[1] and sum(loss.backward_comm_seconds) == 0


def test_llama_flops_are_six_per_parameter_and_token() -> None:
    """Kaplan et al., arXiv 2001.08361: 6 N a token, and attention 3 x 2 s h x 2 / 2 (causal)."""
    block = llama_block(seq=2048)
    values = block.values()
    total = sum(profile(node, values, 4).model_flops for node in block.nodes)
    weights = sum(p.value.shape[0] * p.value.shape[1] for p in block.parameters if len(p.value.shape) == 2)  # type: ignore[operator]
    tokens = 4 * 2048
    assert total == pytest.approx(tokens * (6 * weights + 6 * 2048 * 4096))


def test_gpt2_block_is_quick_to_price() -> None:
    """The solver asks some ten thousand times a mesh."""
    block, mesh = gpt2_block(), mesh_of(dp=2, tp=4)
    plan = block_plan(block, mesh, 0, {}, True, 8)
    costs = BlockCosts(block, mesh, 8, Cluster.parse("dgx-h100:1"))
    for node in plan.nodes:
        costs.node(node)

    def price_all() -> None:
        for _ in range(100):
            for node in plan.nodes:
                costs.node(node)

    assert processor_seconds(price_all, 3) / (100 * len(plan.nodes)) < 200e-6
