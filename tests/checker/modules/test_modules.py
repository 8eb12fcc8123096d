"""``autopar check-module``: what it says of modules that are parallel by hand, and whether that is so on ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.by_hand import layers
from support.by_hand.cases import CASES
from support.by_hand.differences import wrong_gradients
from support.by_hand.layers import MESH
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from autopar.checker.modules.module_check import ModuleVerdict, check_module
from autopar.cli import main
from autopar.dryrun.compat import fake_group
from autopar.errors import AutoparError


@cache
def verdict(name: str) -> ModuleVerdict:
    return check_module(CASES[name].factory, MESH, fake_group)


@pytest.mark.parametrize("name", CASES)
def test_the_wrong_line_is_named(name: str) -> None:
    found = verdict(name)
    if CASES[name].says:
        assert CASES[name].says in found.wrong[0]
        assert ".py:" in found.wrong[0]
    else:
        assert not found.wrong and found.parameters
        assert all("vary" in each or "differ" in each for each in found.assumed.values())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.says or case.gradients])
def test_gradients_are_wrong_where_it_says_so(name: str, ranks: RankPool) -> None:
    wrong = ranks.run(wrong_gradients, name, world=4)
    assert any(wrong) == bool(CASES[name].says)


def test_only_a_vocabulary_that_is_cut_is_assumed() -> None:
    """What each rank looks up has no row; all else is derived."""
    assert {name for name in CASES if verdict(name).assumed and not CASES[name].says} == {"language", "head"}


@pytest.mark.parametrize(
    "name", [pytest.param("layer", marks=pytest.mark.slow), "tokens cut", "language", "10 right", "11 right", "shared key"]
)  # a layer is in the language model
@pytest.mark.parametrize("times", [0, 2])
def test_every_sum_counts(name: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum over ranks that is left out, or made twice, is found, whichever it is."""
    plain, calls = dist.all_reduce, 0

    def changed(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, which: int = -1) -> None:
        nonlocal calls
        calls += 1
        for _ in range(times if calls - 1 == which and (op == dist.ReduceOp.SUM or not times) else 1):
            plain(x, op, group=group)

    def factory(which: int) -> Any:
        nonlocal calls
        calls = 0
        monkeypatch.setattr(dist, "all_reduce", partial(changed, which=which))
        return CASES[name].factory()

    assert not check_module(partial(factory, -1), MESH, fake_group).wrong
    maxima = {"language": 1}.get(name, 0) if times else 0  # the maximum of what is equal is itself
    found = [check_module(partial(factory, which), MESH, fake_group).wrong for which in range(calls)]
    assert [bool(each) for each in found].count(False) == maxima, found


def test_more_ranks_than_are_run() -> None:
    """Of an axis of 16 ranks three are run, and a loss that only the last one has is found."""

    def factory() -> Any:
        group = dist.new_group(list(range(16)))
        module = layers.Loss(nn.Linear(layers.WIDTH, layers.WIDTH))
        scale = 2.0 if dist.get_rank() == 15 else 1.0
        return Scaled(module, group, scale), {name: torch.randn(4, 2, layers.WIDTH) for name in ("x", "target")}

    found = check_module(factory, {"tp": 16}, fake_group)
    assert "different on each rank" in found.wrong[0]


class Scaled(nn.Module):
    def __init__(self, body: nn.Module, group: Any, scale: float) -> None:
        super().__init__()
        self.body, self.group, self.scale = body, group, scale

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.body(x, target) * self.scale


FILE = """
from support.by_hand.layers import Mlp, factory_of
right = factory_of(lambda data, layers: Mlp(layers))
wrong = factory_of(lambda data, layers: Mlp(layers, leave=None))
def none(): return 3
def failing(): raise ValueError("no weights")
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    assert main(["check-module", f"{tmp_path}/mine.py:right", "--mesh", "dp=2,tp=2"]) == 0
    assert "the loss and the gradients of 4 parameters are right" in capsys.readouterr().out
    assert main(["check-module", f"{tmp_path}/mine.py:wrong", "--mesh", "dp=2,tp=2", "--json"]) == 1
    assert "is partial" in json.loads(capsys.readouterr().out)["wrong"][0]


@pytest.mark.parametrize(
    ("name", "mesh", "says"),
    [("right", "dp=2,tp", "is no mesh"), ("none", "dp=2", "returns (module, inputs)"), ("failing", "tp=2", "rank 0 failed"),
     ("right", "dp=4,tp=2", "rank 4 failed"), ("nothing", "dp=2", "has no function")],
)  # fmt: skip
def test_what_a_user_gets_wrong_is_one_line(
    name: str, mesh: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    assert main(["check-module", f"{tmp_path}/mine.py:{name}", "--mesh", mesh]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_plan_of_dtensors_is_refused() -> None:
    def distributed() -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def cut(_: str, module: nn.Module, device_mesh: Any) -> None:
            module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)])))

        return distribute_module(nn.Linear(4, 4, bias=False), mesh, cut), {"input": torch.randn(2, 4)}

    factory: Callable[[], Any] = distributed
    with pytest.raises(AutoparError, match="weight is a DTensor: check-module takes plain tensors"):
        check_module(factory, {"tp": 2}, fake_group)
