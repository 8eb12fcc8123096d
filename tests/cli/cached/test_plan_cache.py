"""Plans that are kept: what makes two questions equal, and that ranks ask once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_api import Net, batch
from support.harness.rank_pool import RankPool

import autopar
from autopar import planning
from autopar.solve.plan_cache import PlanCache
from autopar.solve.search import search


class Counting:
    """`search` that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return search(*args)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(planning, "search", counting)
    return counting


CLUSTER = autopar.Cluster.parse("local:2")


def test_the_same_question_is_answered_from_the_file(tmp_path: Path, searches: Counting) -> None:
    first = autopar.plan(Net(), CLUSTER, batch(), cache=tmp_path)
    lines: list[str] = []
    second = autopar.plan(Net(), CLUSTER, batch(), cache=tmp_path, progress=lines.append)
    assert searches.calls == 1
    assert second == first
    assert any("done before" in line for line in lines)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_is_asked_for_as_by_parallelize(tmp_path: Path, searches: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """True is the folder that `parallelize` has, False and None are none, and a folder may be a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = autopar.plan(Net(), CLUSTER, batch(), cache=True)
    assert autopar.plan(Net(), CLUSTER, batch(), cache=str(tmp_path / "autopar" / "plans")) == first
    assert searches.calls == 1
    assert autopar.plan(Net(), CLUSTER, batch(), cache=False) == first
    assert searches.calls == 2


OTHERS: dict[str, dict[str, Any]] = {
    "model": dict(model=Net(64)),
    "batch": dict(example_inputs=batch(16)),
    "precision": dict(precision="float64"),
    "optimizer": dict(optimizer="sgd"),
    "force": dict(force="tp=2"),
    "margin": dict(memory_margin=0.5),
    "name": dict(name="another"),
    "size": dict(cluster=autopar.Cluster.parse("local:4")),
    "memory": dict(cluster=replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=CLUSTER.device.memory_bytes // 2))),
}


@pytest.fixture(scope="module")
def one_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan of one question."""
    folder = tmp_path_factory.mktemp("one_plan")
    autopar.plan(Net(), CLUSTER, batch(), cache=folder)
    return folder


@pytest.mark.parametrize("what", OTHERS)
def test_another_question_is_searched(one_plan: Path, tmp_path: Path, searches: Counting, what: str) -> None:
    shutil.copytree(one_plan, tmp_path, dirs_exist_ok=True)
    asked: dict[str, Any] = dict(model=Net(), cluster=CLUSTER, example_inputs=batch(), cache=tmp_path)
    autopar.plan(**{**asked, **OTHERS[what]})
    assert searches.calls == 1
    autopar.plan(**asked)
    assert searches.calls == 1


def test_without_a_cache_every_question_is_searched(searches: Counting) -> None:
    for _ in range(2):
        autopar.plan(Net(), CLUSTER, batch())
    assert searches.calls == 2


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version": 1}'])
def test_a_damaged_file_is_searched_again_and_mended(tmp_path: Path, searches: Counting, damage: bytes) -> None:
    first = autopar.plan(Net(), CLUSTER, batch(), cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    autopar.plan(Net(), CLUSTER, batch(), cache=tmp_path)
    assert searches.calls == 2
    assert json.loads(path.read_text())["plan"]["mesh"] == json.loads(first.to_json())["mesh"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert autopar.plan(Net(), CLUSTER, batch(), cache=tmp_path / "file").candidate.mesh.size == 2


def test_unfinished_searches_are_not_kept(tmp_path: Path) -> None:
    plan = autopar.plan(Net(), CLUSTER, batch())
    document = json.loads(plan.to_json())
    document["search"]["cut_short"] = "the time limit of 60 s"  # whatever the statuses of its candidates are
    PlanCache(tmp_path).store({"key": 1}, autopar.Plan.from_json(json.dumps(document)))
    assert not list(tmp_path.iterdir())
    PlanCache(tmp_path).store({"key": 1}, plan)
    assert len(list(tmp_path.iterdir())) == 1


def _searches_of_this_rank() -> tuple[int, int, str]:
    """On every rank: (captures, searches, mesh) of one `parallelize`."""
    import torch.distributed as dist

    from autopar import api

    calls = {"search": 0}
    before = planning.search

    def counted(*args: Any) -> Any:
        calls["search"] += 1
        return before(*args)

    planning.search = counted  # type: ignore[assignment]
    try:
        torch.manual_seed(dist.get_rank())  # plans must not depend on it
        parallel = api.parallelize(Net(), autopar.Cluster.parse(f"local:{dist.get_world_size()}"), batch(), cache=False)
    finally:
        planning.search = before
    return dist.get_rank(), calls["search"], ",".join(sorted(name for name, _ in parallel.named_parameters()))


def test_rank_zero_searches_and_the_others_are_told(ranks: RankPool) -> None:
    found = ranks.run(_searches_of_this_rank, world=2)
    assert [(rank, count) for rank, count, _ in found] == [(0, 1), (1, 0)]
    assert len({names for _, _, names in found}) == 1


def _infeasible() -> str:
    import torch.distributed as dist

    from autopar import api

    cluster = autopar.Cluster.parse(f"local:{dist.get_world_size()}")
    tiny = replace(cluster, device=replace(cluster.device, memory_bytes=cluster.device.base_bytes // 2))
    try:
        api.parallelize(Net(), tiny, batch(), cache=False)
    except autopar.Infeasible as error:
        return str(error)
    return ""


def test_an_error_of_rank_zero_is_raised_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(_infeasible, world=2)
    assert first and first == second
