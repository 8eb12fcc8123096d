"""Each private torch call of runtime/compat does what autopar thinks it does, on this version of torch."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import autopar.runtime
from autopar.runtime.compat import autograd, collectives, dtensor, hooks, modules
from autopar.runtime.compat.compile import BlockBackend, compiler_named, marked_for_recomputation
from autopar.runtime.device.mesh import MeshHandle


def functional(axes: dict[str, int]) -> dict[str, list[float]]:
    tp = MeshHandle(axes).tp
    x, group, size = torch.arange(8.0) + tp.coordinate, tp.group_name, tp.size
    return {
        "sum": collectives.wait_tensor(collectives.all_reduce(x, "sum", group)).tolist(),
        "max": collectives.wait_tensor(collectives.all_reduce(x, "max", group)).tolist(),
        "min": collectives.wait_tensor(collectives.all_reduce(x, "min", group)).tolist(),
        "gather": collectives.wait_tensor(collectives.all_gather(x[:1], size, group)).tolist(),
        "scatter": collectives.wait_tensor(collectives.reduce_scatter(x, "sum", size, group)).tolist(),
        "all_to_all": collectives.wait_tensor(collectives.all_to_all(x, size, group)).tolist(),
        "x": x.tolist(),
    }


def test_functional_collectives(ranks: RankPool) -> None:
    for rank, out in enumerate(ranks.run(functional, {"tp": 4})):
        assert out["x"] == [float(i + rank) for i in range(8)]  # inputs are left alone
        assert out["sum"] == [4.0 * i + 6 for i in range(8)]
        assert out["max"] == [i + 3.0 for i in range(8)] and out["min"] == [float(i) for i in range(8)]
        assert out["gather"] == [0.0, 1.0, 2.0, 3.0]
        assert out["scatter"] == [4.0 * i + 6 for i in (2 * rank, 2 * rank + 1)]
        assert out["all_to_all"] == [float(2 * rank + i + source) for source in range(4) for i in range(2)]


def sums_of_destroyed_groups() -> list[float]:
    """Sums over an axis of meshes that are alike, the group of each of which is destroyed."""
    sums = []
    for number in range(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("destroyed", "tp"))
        name = collectives.group_name(mesh, "destroyed")
        sums.append(collectives.wait_tensor(collectives.all_reduce(torch.tensor([1.0 + number]), "sum", name)).item())
        dist.destroy_process_group(mesh.get_group("destroyed"))
    return sums


def test_a_mesh_like_one_whose_group_was_destroyed(ranks: RankPool) -> None:
    assert ranks.run(sums_of_destroyed_groups) == [[2.0, 4.0, 6.0]] * 4


def elementwise(axes: dict[str, int]) -> list[str]:
    """What `usual_operation` makes of element-wise operations otherwise than DTensor, of uneven shards and of replicas."""
    aten, mesh, wrong = torch.ops.aten, MeshHandle(axes).device_mesh, []
    for placement in (Shard(0), Shard(1), Replicate()):
        a, b = (distribute_tensor(torch.arange(1.0, 31, dtype=torch.float64).view(6, 5) * k, mesh, [placement]) for k in (1, -2))
        for op, args, kwargs in (
            (aten.lerp_.Scalar, (b, 0.3), {}), (aten.addcmul_.default, (b, b), {"value": 0.5}), (aten.mul_.Tensor, (0.5,), {}),
            (aten.add.Tensor, (b,), {"alpha": 2}), (aten.sqrt.default, (), {}), (aten.zeros_like.default, (), {}),
            (aten.clone.default, (), {}), (aten.gt.Tensor, (b,), {}), (aten.zeros_like.default, (), {"dtype": torch.float32}),
        ):  # fmt: skip
            assert dtensor.is_elementwise(op) and dtensor._placed_alike((a, *args), kwargs)
            mine, theirs = a.clone(), a.clone()
            made = dtensor.usual_operation(op, (mine, *args), kwargs)
            with patch.dict(dtensor.operations_of_shards(), clear=True):
                expected = op(theirs, *args, **kwargs)
            same = type(made) is type(expected) and made._spec == expected._spec and torch.equal(*map(local, (made, expected)))
            if not same or not torch.equal(*map(local, (mine, theirs))) or (made is mine) != (expected is theirs):
                wrong.append(f"{op} of {placement}")
    return wrong


def local(value: DTensor) -> torch.Tensor:
    return value.to_local()


def left_to_dtensor(axes: dict[str, int]) -> list[bool]:
    mesh = MeshHandle(axes).device_mesh
    rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    numbers = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    pairs = ((rows, columns), (rows, rows.double()), (partial, partial), (rows, numbers), (rows, torch.ones(4, 4)))
    return [dtensor._placed_alike(pair, {}) for pair in pairs]


def test_elementwise_operations_are_those_of_dtensor(ranks: RankPool) -> None:
    assert ranks.run(elementwise, {"tp": 4}) == [[]] * 4
    assert ranks.run(left_to_dtensor, {"tp": 4}) == [[False] * 5] * 4
    for op in (torch.ops.aten.add.out, torch.ops.aten.equal.default, torch.ops.aten.sum.default, torch.ops.aten.normal_.default):
        assert not dtensor.is_elementwise(op)


def rows(axes: dict[str, int]) -> list[list[float]]:
    """Rank r sends r + s rows to rank s, but none to itself."""
    tp = MeshHandle(axes).tp
    counts = [[0 if r == s else r + s for s in range(tp.size)] for r in range(tp.size)]
    send, receive = counts[tp.coordinate], [counts[r][tp.coordinate] for r in range(tp.size)]
    x = torch.tensor([[tp.coordinate, float(s)] for s in range(tp.size) for _ in range(send[s])])
    return collectives.wait_tensor(collectives.all_to_all_rows(x, receive, send, tp.group_name)).tolist()  # type: ignore[no-any-return]


def test_rows_to_each_rank(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(rows, {"tp": 4})):
        assert found == [[source, rank] for source in range(4) if source != rank for _ in range(source + rank)]


def test_what_has_data() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert autograd.has_data(torch.ones(2))
    assert not autograd.has_data(fake) and not autograd.has_data(torch.ones(2, device="meta"))


def test_autograd_inside_of_an_operator() -> None:
    def sine_gradient(x: torch.Tensor) -> torch.Tensor:
        with autograd.autograd_in_kernel():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.view(-1).sin().sum(), leaf)[0]

    operator = torch.library.custom_op("autopar_test::sine_gradient", sine_gradient, mutates_args=())
    x = torch.randn(3, requires_grad=True)
    assert operator(x).equal(x.detach().cos())


def test_callbacks_run_at_the_end_of_backward() -> None:
    order: list[str] = []
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def first(_: Any) -> None:
        assert autograd.in_backward()
        autograd.at_end_of_backward(lambda: order.append("end"))
        order.append("b")

    b.register_post_accumulate_grad_hook(first)
    a.register_post_accumulate_grad_hook(lambda _: order.append("a"))
    ((a * 2).exp() * b).sum().backward()
    assert sorted(order[:2]) == ["a", "b"] and order[2:] == ["end"] and not autograd.in_backward()


def test_transforms_and_batched_gradients_are_seen() -> None:
    seen, x = [], torch.ones(2, requires_grad=True)

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(autograd.in_transform())
        return x.square()

    torch.func.grad(lambda x: square(x).sum())(x), torch.func.vmap(square)(x), torch.func.jvp(square, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        square(x)
    y = square(x)
    y.grad_fn.register_prehook(lambda gradients: seen.append(autograd.is_batched(gradients[0])))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, True, True, True, False, True, False]


def test_strided_shard_cuts_the_minor_part() -> None:
    placement = dtensor.strided_shard(0, 3)
    pieces, _ = placement._split_tensor(torch.arange(12), 2, with_padding=False)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert dtensor.is_strided(placement) and not dtensor.is_strided(torch.distributed.tensor.Shard(0))


def test_every_public_function_of_compat_is_used() -> None:
    folder = Path(inspect.getfile(autopar.runtime)).parents[1]
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    every = (autograd, collectives, dtensor, hooks, modules)
    values = [(name, value, each.__name__) for each in every for name, value in vars(each).items()]
    names = [name for name, value, module in values if inspect.isfunction(value) and value.__module__ == module]
    assert all(text.count(name) > 1 for name in names)


def test_the_runtime_imports_torch_and_itself_only() -> None:
    folder = Path(inspect.getfile(autopar.runtime)).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level or (node.module or "").split(".")[0] in {"torch", *sys.stdlib_module_names}, path
            elif isinstance(node, ast.Import):
                assert all(name.name.split(".")[0] in {"torch", *sys.stdlib_module_names} for name in node.names), path


SCRIPT = """
import sys; sys.path[:0] = {paths!r}
import torch
from support.models.handwritten_program import Model, Tiny, V
from autopar.runtime.errors import LaunchProblem
from autopar.runtime.device.mesh import MeshHandle, shut_down
from autopar.runtime.parallel import Parallel
torch.manual_seed(0)
try:
    parallel = Parallel(Tiny(MeshHandle({axes!r})), Model().double().state_dict())
except LaunchProblem as problem:
    sys.exit(str(problem))
ids = torch.arange(40).view(8, 5) % V
parallel(ids=ids, labels=ids).backward()
print("done", len(parallel.full_gradients()), flush=True)
shut_down()
"""


def script(folder: Path, axes: dict[str, int]) -> Path:
    tests, path = Path(__file__).parents[2], folder / "train.py"
    path.write_text(SCRIPT.format(axes=axes, paths=[str(tests.parent), str(tests)]))
    return path


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """A real launch ends with status 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(script(tmp_path, {"dp": 2}))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_the_wrong_number_of_processes_is_one_line(tmp_path: Path, ranks: RankPool) -> None:
    for ended in launch(ranks, script(tmp_path, {"tp": 4}), 2):
        assert ended.status == 1
        (line,) = [line for line in ended.stderr.splitlines() if "processes" in line]
        assert line.startswith("this program is for 4 processes (tp=4) but 2 were launched; use torchrun --nproc-per-node 4")


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(script(tmp_path, {"dp": 1}))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_sole_holder_counts_views() -> None:
    flat = torch.zeros(4)
    assert autograd.sole_holder(flat)
    view = flat[1:].view(3, 1)
    assert not autograd.sole_holder(flat)
    del view
    assert autograd.sole_holder(flat)


class Twice(torch.autograd.Function):
    """The same forward, and twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return autograd.alias(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_an_alias_keeps_its_function_in_compiled_code() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, Twice.apply(y)  # type: ignore[no-untyped-call]

    for run in (both, torch.compile(both, backend="aot_eager")):
        x = torch.ones(3, requires_grad=True)
        a, b = run(x)
        assert a.data_ptr() == b.data_ptr()
        (a + b).sum().backward()
        torch.testing.assert_close(x.grad, 3 * torch.ones(3).cos())


def own_stores() -> bool:
    collectives.own_store().set("compat", "there")
    torch.distributed.barrier()
    return bool(collectives.own_store().check(["compat"]))


def test_an_own_store_is_the_same_store(ranks: RankPool) -> None:
    assert ranks.run(own_stores, world=2) == [True, True]


def reductions() -> Any:
    """Two products in a module, bfloat16 over float32: one gradient is added up by an earlier backward, one is not."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a * x).sum() + (self.b.detach() * x).sum()

    two = Two()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(two, mesh=MeshHandle({"dp": 2}).device_mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    assert isinstance(two, FSDPModule)
    two.set_gradient_divide_factor(1.0)
    two.set_force_sum_reduction_for_comms(True)
    parameters = dict(two.named_parameters())
    two.set_requires_gradient_sync(False)
    two.set_reshard_after_backward(False)
    two.set_is_last_backward(False)
    for _ in range(2):
        two(torch.ones(4)).backward()
    before = len(two._get_fsdp_state()._comm_ctx.post_forward_order)  # type: ignore[no-untyped-call]
    modules.clear_forward_order(two)
    groups = two._get_fsdp_state()._fsdp_param_groups
    indices = [group._post_forward_indices for group in groups]
    two.b.backward(torch.full((4,), 3.0, dtype=two.b.dtype))
    two.set_requires_gradient_sync(True)
    two.set_reshard_after_backward(True)
    two.set_is_last_backward(True)
    modules.reduce_gradients(two)
    modules.finish_backward(two)
    return before, indices, {name: parameters[name].grad.full_tensor().tolist() for name in ("a", "b")}  # type: ignore[union-attr]


def trained_later() -> list[list[float]]:
    """A sharded module whose parameters were all frozen in its first forward."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(4, 2, bias=False)
    nn.init.ones_(layer.weight)
    layer.requires_grad_(False)
    fully_shard(layer, mesh=MeshHandle({"dp": 2}).device_mesh["dp"])
    layer(torch.ones(1, 4))
    layer.weight.requires_grad_(True)
    modules.train_more(layer)
    layer(torch.ones(1, 4)).sum().backward()
    return layer.weight.grad.full_tensor().tolist()  # type: ignore[no-any-return, union-attr]


def test_parameters_that_train_later_are_reduced(ranks: RankPool) -> None:
    assert ranks.run(trained_later, world=2) == [[[1.0] * 4] * 2] * 2


def test_gradients_are_reduced_when_asked(ranks: RankPool) -> None:
    for before, indices, gradients in ranks.run(reductions, world=2):
        assert before == 2 and indices == [[]]
        assert gradients == {"a": [4.0] * 4, "b": [6.0] * 4}


@pytest.mark.slow
def test_a_cached_graph_is_that_of_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that differ in what is recomputed alone: the caches of compiled graphs take them for two."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inductor = BlockBackend(compiler_named("inductor"))

    def saved_of(marked: bool) -> list[tuple[int, ...]]:
        def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if marked:
                with marked_for_recomputation():
                    h = x @ w
            else:
                h = x @ w
            return h.sin()

        torch._dynamo.reset()
        compiled = torch.compile(forward, backend=inductor, fullgraph=True)
        saved = list[tuple[int, ...]]()
        x, w = torch.ones(8, 4), torch.ones(4, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(tuple(x.shape)), x)[1], lambda x: x):
            compiled(x, w).sum().backward()
        return saved

    for _ in range(2):
        assert (8, 16) in saved_of(False) and (8, 16) not in saved_of(True)
