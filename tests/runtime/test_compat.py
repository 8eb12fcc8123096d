"""Each private torch call of runtime/compat.py does what autopar thinks it does, on this version of torch."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Ranks

import autopar.runtime
from autopar.runtime import compat
from autopar.runtime.mesh import MeshHandle


def functional(axes: dict[str, int]) -> dict[str, list[float]]:
    tp = MeshHandle(axes).tp
    x, group, size = torch.arange(8.0) + tp.coordinate, tp.group_name, tp.size
    return {
        "sum": compat.wait(compat.all_reduce(x, "sum", group)).tolist(),
        "max": compat.wait(compat.all_reduce(x, "max", group)).tolist(),
        "min": compat.wait(compat.all_reduce(x, "min", group)).tolist(),
        "gather": compat.wait(compat.all_gather(x[:1], size, group)).tolist(),
        "scatter": compat.wait(compat.reduce_scatter(x, "sum", size, group)).tolist(),
        "all_to_all": compat.wait(compat.all_to_all(x, size, group)).tolist(),
        "x": x.tolist(),
    }


def test_functional_collectives(ranks: Ranks) -> None:
    for rank, out in enumerate(ranks.run(functional, {"tp": 4})):
        assert out["x"] == [float(i + rank) for i in range(8)]  # inputs are left alone
        assert out["sum"] == [4.0 * i + 6 for i in range(8)]
        assert out["max"] == [i + 3.0 for i in range(8)] and out["min"] == [float(i) for i in range(8)]
        assert out["gather"] == [0.0, 1.0, 2.0, 3.0]
        assert out["scatter"] == [4.0 * i + 6 for i in (2 * rank, 2 * rank + 1)]
        assert out["all_to_all"] == [float(2 * rank + i + source) for source in range(4) for i in range(2)]


def test_callbacks_run_at_the_end_of_backward() -> None:
    order: list[str] = []
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def first(_: Any) -> None:
        assert compat.in_backward()
        compat.at_end_of_backward(lambda: order.append("end"))
        order.append("b")

    b.register_post_accumulate_grad_hook(first)
    a.register_post_accumulate_grad_hook(lambda _: order.append("a"))
    ((a * 2).exp() * b).sum().backward()
    assert sorted(order[:2]) == ["a", "b"] and order[2:] == ["end"] and not compat.in_backward()


def test_strided_shard_cuts_the_minor_part() -> None:
    placement = compat.strided_shard(0, 3)
    pieces, _ = placement._split_tensor(torch.arange(12), 2, with_padding=False)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert compat.is_strided(placement) and not compat.is_strided(torch.distributed.tensor.Shard(0))


def test_every_public_function_of_compat_is_used() -> None:
    folder = Path(inspect.getfile(autopar.runtime)).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    names = [name for name, value in vars(compat).items() if inspect.isfunction(value) and value.__module__ == compat.__name__]
    assert all(text.count(name) > 1 for name in names)


def test_the_runtime_imports_torch_and_itself_only() -> None:
    folder = Path(inspect.getfile(autopar.runtime)).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.module or "").split(".")[0] in {"torch", *sys.stdlib_module_names}, path
            elif isinstance(node, ast.Import):
                assert all(name.name.split(".")[0] in {"torch", *sys.stdlib_module_names} for name in node.names), path


SCRIPT = """
import sys; sys.path[:0] = {paths!r}
import torch
from support.tiny_program import Model, Tiny, V
from autopar.runtime.errors import LaunchProblem
from autopar.runtime.mesh import MeshHandle, finish
from autopar.runtime.parallel import Parallel
torch.manual_seed(0)
try:
    parallel = Parallel(Tiny(MeshHandle({axes!r})), Model().double().state_dict())
except LaunchProblem as problem:
    sys.exit(str(problem))
ids = torch.arange(40).view(8, 5) % V
parallel(ids=ids, labels=ids).backward()
print("done", len(parallel.full_gradients()), flush=True)
finish()
"""


@pytest.mark.parametrize(("axes", "status"), [({"dp": 2}, 0), ({"tp": 4}, 1)])
def test_under_torchrun(tmp_path: Path, axes: dict[str, int], status: int) -> None:
    """A real launch ends with status 0; one with the wrong number of processes says so in a line."""
    tests = Path(__file__).parents[1]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(axes=axes, paths=[str(tests.parent), str(tests)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    if status:
        assert "this program is for 4 processes (tp=4) but 2 were launched; use torchrun --nproc-per-node 4" in done.stderr
    else:
        assert done.stdout.count("done") == 2


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(axes={"dp": 1}, paths=[str(tests.parent), str(tests)]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_sole_holder_counts_views() -> None:
    flat = torch.zeros(4)
    assert compat.sole_holder(flat)
    view = flat[1:].view(3, 1)
    assert not compat.sole_holder(flat)
    del view
    assert compat.sole_holder(flat)
