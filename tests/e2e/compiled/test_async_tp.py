"""Asynchronous tensor parallelism of compiled blocks: which collectives run in pieces with products, with the numbers of one
process. The operators are our own, by messages, or those of torch over symmetric memory, with its functional implementations for
CPUs. The graphs of inductor run as they are, and as its kernels in slow tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, prepare, program
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_pipelines
from support.judges.inductor_graphs import run_and_get_graphs
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import api
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Link
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.ir.plan import Precision
from autopar.rules.registry import default_registry
from autopar.runtime import collectives as C
from autopar.runtime.comm import async_tp
from autopar.runtime.comm.async_tp import all_gather_products, async_tp_groups, product_reduce_scatter
from autopar.runtime.compat.async_tp import AsyncTpGroup, fuse
from autopar.runtime.compat.compile import BlockBackend, compiler_named
from autopar.runtime.device.axis import AxisHandle
from autopar.runtime.device.mesh import MeshHandle
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.space.force import parse_force

BATCH, LENGTH, WIDTH, INNER, HEAD = 2, 8, 16, 24, 2
SHAPES = ((WIDTH,), (16, WIDTH), (8, WIDTH), (8, WIDTH), (WIDTH, 16), (WIDTH,), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
CUT = (None, 0, 0, 0, 1, None, 0, 0, 1)
"""Of each weight of the layer the dimension that the axis shards: two norms are whole."""
FUSED = {
    True: ("fused_all_gather_matmul.default(", "fused_matmul_reduce_scatter.default("),
    False: ("all_gather_products.default(", "product_reduce_scatter.default("),
}
"""With symmetric memory, and by messages."""
SEQUENCE_PARALLEL = "tp=2,pp=1,zero=0,micro_batches=1,recompute=none,zero_group=0,sequence_parallel=1"
RUNS = {"graphs": run_and_get_graphs, "kernels": run_and_get_code}
HOW = ("graphs", pytest.param("kernels", marks=pytest.mark.slow))


@contextmanager
def operators_for_cpus() -> Iterator[None]:
    """Torch's fused operators on gloo."""
    from torch.distributed import _symmetric_memory as symmetric

    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
        yield


def layer(x: Tensor, weights: tuple[Tensor, ...], axis: AxisHandle, split: bool = False) -> Tensor:
    """A layer of Llama with tensor and sequence parallelism; on an axis of one rank, of one process. `split`: as a program with
    work between the start of a collective and its wait."""
    first, query, key, value, out, second, gate, up, down = weights

    def convert(x: Tensor, text: str) -> Tensor:
        return C.wait(C.start(x, axis, text)) if split else C.convert(x, axis, text)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, True) + 1e-6).rsqrt() * weight

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, HEAD).transpose(1, 2)

    whole = convert(norm(x, first), "S(1) -> R")
    q, k, v = (heads(F.linear(whole, weight)) for weight in (query, key, value))
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    x = x + convert(F.linear(attention, out), "P -> S(1)")
    whole = convert(norm(x, second), "S(1) -> R")
    return x + convert(F.linear(F.silu(F.linear(whole, gate)) * F.linear(whole, up), down), "P -> S(1)")


def operands() -> tuple[Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    x, *weights = (torch.randn(shape, dtype=torch.float64) for shape in ((BATCH, LENGTH, WIDTH), *SHAPES))
    return x, tuple(weights)


def gradients(run: Any, x: Tensor, weights: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in (x, *weights)]
    result = run(leaves[0], tuple(leaves[1:]))
    return [result.detach(), *torch.autograd.grad(result.square().sum(), leaves)]


def layer_in_pieces(how: str, split: bool, every: bool, symmetric: bool, world: int = 2) -> tuple[list[tuple[int, int]], float]:
    """On a rank: the fused all-gathers and reduce-scatters of forward and backward, and the largest relative difference of
    results and gradients from one process."""
    torch._dynamo.reset()
    tp = MeshHandle({"tp": world}).tp
    x, weights = operands()
    expected = gradients(lambda x, w: layer(x, w, AxisHandle("tp")), x, weights)
    parts = zip(weights, CUT, strict=True)
    own = tuple(each if at is None else each.chunk(world, at)[tp.coordinate].contiguous() for each, at in parts)
    backend = BlockBackend(compiler_named("inductor"), every, frozenset({AsyncTpGroup(tp.group_name, 1, symmetric)}))
    compiled = torch.compile(lambda x, w: layer(x, w, tp, split), backend=backend, fullgraph=True)
    with operators_for_cpus():
        found, codes = RUNS[how](lambda: gradients(compiled, x.chunk(world, 1)[tp.coordinate].contiguous(), own))
    difference = 0.0
    for one, whole, at in zip(found, expected, (1, 1, *CUT), strict=True):
        if at is None:  # each rank has the part of its tokens
            dist.all_reduce(one)
        part = whole if at is None else whole.chunk(world, at)[tp.coordinate]
        difference = max(difference, float((one - part).abs().max() / whole.abs().max()))
    return [counted(code, symmetric) for code in codes], difference


def counted(code: str, symmetric: bool) -> tuple[int, int]:
    """The fused all-gathers and reduce-scatters in code of inductor, or of a graph of it."""
    gathers, scatters = (code[max(code.find("def call"), 0) :].count(name) for name in FUSED[symmetric])
    return gathers, scatters


SYMMETRIC = (False, pytest.param(True, id="symmetric"))


@pytest.mark.parametrize("symmetric", SYMMETRIC)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_collectives_of_a_layer_run_in_pieces(how: str, split: bool, symmetric: bool, ranks: RankPool) -> None:
    """All four of the forward; of the backward the gathers of gradients. Gradients of weights hide its reduce-scatters."""
    for fused, difference in ranks.run(layer_in_pieces, how, split, False, symmetric, world=2, timeout=240):
        assert fused == [(2, 2), (2, 0)]
        assert difference < 1e-9


@pytest.mark.parametrize("symmetric", SYMMETRIC)
@pytest.mark.parametrize("how", HOW)
def test_recomputed_collectives_run_in_pieces(how: str, symmetric: bool, ranks: RankPool) -> None:
    for fused, difference in ranks.run(layer_in_pieces, how, False, True, symmetric, world=2, timeout=240):
        assert fused == [(2, 2), (4, 1)]
        assert difference < 1e-9


def test_pieces_of_four_ranks(ranks: RankPool) -> None:
    for fused, difference in ranks.run(layer_in_pieces, "graphs", False, False, False, 4, world=4, timeout=240):
        assert fused == [(2, 2), (2, 0)]
        assert difference < 1e-9


def scaled_products() -> list[bool]:
    """On a rank: whether products in float8 are fused with collectives, with symmetric memory and by messages."""
    name = MeshHandle({"tp": 2}).tp.group_name
    c10d, found = torch.ops._c10d_functional, []

    def gathered(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, name))
        product = torch.ops.aten._scaled_mm.default(whole, weight, scale, scale, None, None, torch.bfloat16)
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(product, "sum", 2, name))  # type: ignore[no-any-return]

    with FakeTensorMode():
        x, weight = torch.empty(32, 64, dtype=torch.float8_e4m3fn), torch.empty(64, 64, dtype=torch.float8_e4m3fn).t()
        for symmetric in (True, False):
            graph = make_fx(gathered)(x, weight, torch.ones(())).graph
            fuse(graph, frozenset({AsyncTpGroup(name, 1, symmetric)}))
            found.append(any("fused" in str(node.target) for node in graph.nodes))
    return found


def test_products_in_float8_have_no_messages(ranks: RankPool) -> None:
    assert ranks.run(scaled_products, world=2) == [[True, False]] * 2


def operators_alone(dim: int, dtype: torch.dtype) -> list[float]:
    """On a rank: how far the operators are from a collective and a product, for a tensor that is sharded along a dimension."""
    tp = MeshHandle({"tp": 3}).tp
    torch.manual_seed(1)
    shards, scattered = torch.randn(3, 2, 4, 5, dtype=dtype), torch.randn(3, 6, 6, 5, dtype=dtype)
    matrices = [torch.randn(5, width, dtype=dtype) for width in (4, 7)]
    expected = torch.cat(list(shards), dim)
    whole, products = all_gather_products(shards[tp.coordinate], matrices, dim, tp.group_name)
    reduced = product_reduce_scatter(scattered[tp.coordinate], matrices[0], "sum", dim, tp.group_name)
    total = (scattered @ matrices[0]).sum(0).chunk(3, dim)[tp.coordinate]
    assert reduced.is_contiguous() and torch.equal(whole, expected)
    pairs = [*zip(products, (expected @ each for each in matrices), strict=True), (reduced, total)]
    return [float((one - other).abs().max()) for one, other in pairs]


@pytest.mark.parametrize("dim", [0, 1])
def test_operators_equal_collective_and_product(dim: int, ranks: RankPool) -> None:
    for found in ranks.run(operators_alone, dim, torch.float64, world=3):
        assert max(found) < 1e-12


def test_what_operators_promise_to_a_trace(ranks: RankPool) -> None:
    """Shapes and strides of fake tensors, which compiled code relies on."""
    ranks.run(check_operators, world=2)


def check_operators() -> None:
    tp = MeshHandle({"tp": 2}).tp
    checks = "test_schema", "test_faketensor"
    for dim in (0, 1):
        arguments = torch.randn(2, 4, 5), [torch.randn(5, 4), torch.randn(5, 6)], dim, tp.group_name
        torch.library.opcheck(all_gather_products, arguments, test_utils=checks)
        arguments = torch.randn(2, 4, 5), torch.randn(5, 4), "sum", dim, tp.group_name
        torch.library.opcheck(product_reduce_scatter, arguments, test_utils=checks)


def steps_in_pieces(
    how: str, symmetric: bool, text: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Any, list[tuple[int, int]]]:
    """On a rank: what a program gives in steps of an optimizer, and the fused operators of each graph."""
    torch._dynamo.reset()
    with operators_for_cpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshHandle, "async_tp", property(lambda mesh: groups_of(mesh, symmetric)))
        outcome, codes = RUNS[how](lambda: train_pipelines([(text, state, batch)], compile="inductor")[0][0])
    return outcome, [counted(code, symmetric) for code in codes]


def groups_of(mesh: MeshHandle, symmetric: bool) -> frozenset[AsyncTpGroup]:
    return frozenset({AsyncTpGroup(mesh.tp.group_name, 1, symmetric)})


def sequence_parallel_program(prepared: Prepared) -> str:
    """As Megatron places a model, in a mode of its own of the planner."""
    forced = parse_force(SEQUENCE_PARALLEL)
    fixed = configuration_of(forced, Precision("float64", "float64"), "adamw")
    return program(prepared, price_configuration(prepared.graph, Cluster.parse("local:2"), fixed, default_registry()))


@pytest.mark.parametrize("symmetric", SYMMETRIC)
@pytest.mark.parametrize("how", HOW)
def test_a_model_in_pieces_equals_one_process(how: str, symmetric: bool, ranks: RankPool) -> None:
    prepared = prepare("llama")
    text = sequence_parallel_program(prepared)
    for outcome, fused in ranks.run(
        steps_in_pieces, how, symmetric, text, prepared.state, prepared.batch, world=2, timeout=500
    ):  # fmt: skip
        assert not differences(outcome, prepared.expected, 1e-9), text
        assert sorted(each for each in fused if any(each)) == [(1, 0), (2, 0), (2, 2)], text  # the head, and both ways of a layer


def groups_of_axes(axes: Mapping[str, int], by_messages: bool) -> tuple[frozenset[AsyncTpGroup], list[str], dict[str, int]]:
    """On a rank without a GPU: the groups in pieces, what is said, and what was asked of torch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = async_tp_groups(MeshHandle({"dp": 1, "tp": 2}), axes, by_messages=by_messages)
    from torch.distributed import _symmetric_memory as symmetric

    return found, [str(each.message) for each in caught], dict(symmetric._group_name_to_workspace_tensor)


def test_without_symmetric_memory_pieces_are_messages_where_asked_for(ranks: RankPool) -> None:
    first, second = ranks.run(groups_of_axes, {"tp": 1}, True, world=2)
    ((name, least, symmetric),) = first[0]
    assert (least, symmetric) == (1, False) and not first[1] and not first[2] and first == second
    first, second = ranks.run(groups_of_axes, {"tp": 1}, False, world=2)
    assert first[0] == second[0] == frozenset() and not first[2]
    assert len(first[1]) == 1 and "symmetric memory takes CUDA devices and NCCL" in first[1][0] and not second[1]
    assert ranks.run(groups_of_axes, {}, False, world=2) == [(frozenset(), [], {})] * 2
    assert ranks.run(groups_of_axes, {"dp": 1}, False, world=2) == [(frozenset(), [], {})] * 2


class Perceptron(torch.nn.Module):
    """A residual of products without a bias, of more than 2^18 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(640)
        self.up, self.down = torch.nn.Linear(640, 1280, bias=False), torch.nn.Linear(1280, 640, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(self.norm(x)).relu())).square().mean()


def plan_and_step() -> tuple[list[tuple[int, int]], float]:
    """On a rank of two that a switch joins: what `parallelize` runs in pieces, and how far a step is from one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Perceptron().double(), torch.randn(2, 256, 640, dtype=torch.float64)
    expected = copy.deepcopy(model)
    expected(x).backward()
    links, overlap = (Link("network", 2, 1e8, 1e-6),), Overlap(async_tp_by_messages=True)
    cluster = replace(Cluster.parse("local:2"), links=links, overlap=overlap)
    parallel = api.parallelize(model, cluster, (x,), compile=True, force="tp=2,zero=0", cache=False)
    loss, codes = run_and_get_graphs(lambda: parallel(x))
    loss.backward()
    pairs = zip(parallel.parameters(), expected.parameters(), strict=True)
    difference = max(float((one.grad.full_tensor() - other.grad).abs().max()) for one, other in pairs)  # type: ignore
    return [counted(code, False) for code in codes], difference


def test_a_plan_for_a_switch_runs_in_pieces(ranks: RankPool) -> None:
    for fused, difference in ranks.run(plan_and_step, world=2, timeout=120):
        assert fused == [(0, 1), (1, 0)]  # a product whose result is scattered, and the gradient of that
        assert difference < 1e-9


class SumOfSquares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().sum()


def built_where_one_rank_compiles() -> tuple[bool, list[str]]:
    """On a rank: whether it has groups, and what is said, where the first rank compiles and the second does not."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(api, "planned_async_tp", lambda plan: {plan.candidate.mesh.axes[-1].name: 1})
        patch.setattr(async_tp, "symmetric_memory_problem", lambda device: "")
        patch.setattr(async_tp, "set_up_symmetric_memory", lambda group: "")
        parallel = api.parallelize(
            SumOfSquares(), "local:2", (torch.ones(4, 8),), compile=dist.get_rank() == 0, force="tp=2", cache=False
        )
    said = [str(each.message) for each in caught if "in pieces" in str(each.message)]
    return bool(parallel.program.mesh.async_tp), said


def test_a_rank_that_does_not_compile_takes_part_in_the_agreement(ranks: RankPool) -> None:
    """One node may lack Triton: its ranks neither wait for the others, nor do these for operators that it does not run."""
    (first, said), (second, nothing) = ranks.run(built_where_one_rank_compiles, world=2, timeout=60)
    assert not first and not second and not nothing
    assert len(said) == 1 and "a rank's blocks are not compiled by inductor" in said[0]


def groups_of_failing_set_up(failing: int, by_messages: bool) -> frozenset[AsyncTpGroup]:
    """On a rank of a machine whose devices have symmetric memory, as far as is known before: its groups, where the set-up fails
    on one rank."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(async_tp, "symmetric_memory_problem", lambda device: "")
        problem = "out of handles" if dist.get_rank() == failing else ""
        patch.setattr(async_tp, "set_up_symmetric_memory", lambda group: problem)
        return async_tp_groups(MeshHandle({"tp": 2}), {"tp": 7}, by_messages=by_messages)


def test_ranks_agree_on_symmetric_memory(ranks: RankPool) -> None:
    """All have it, or none: ranks with other code would wait for each other."""
    for failing in (0, 1, -1):
        found = ranks.run(groups_of_failing_set_up, failing, True, world=2)
        ((_, least, symmetric),) = found[0]
        assert found[0] == found[1] and (least, symmetric) == (7, failing < 0)
        found = ranks.run(groups_of_failing_set_up, failing, False, world=2)
        assert found[0] == found[1] and len(found[0]) == (failing < 0)
