"""The first call on a machine: what is wrong is said before it is measured, and measuring says what it does and for how long."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.cost_models.calibrate import local_cluster
from autopar.cost_models.calibrate.measure import QUICK_SECONDS, quick_effort
from autopar.cost_models.calibrate.measure_rank import RankBenchmark
from autopar.plan_inputs import cache_folder

BATCH = (torch.zeros(4, 8),)


class Measured(Exception):
    """The machine is measured."""


@pytest.fixture
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was measured before, and measuring raises."""

    def measure(*given: Any) -> Any:
        raise Measured

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local_cluster, "measure_local", measure)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (dict(cluster="local:4"), "4 devices but 1 processes"),
        (dict(model=nn.Linear), "Linear is a class"),
        (dict(optimizer="nope"), "'nope' is not known"),
        (dict(force="tp=2,tp=4"), "tp is written twice"),
        (dict(time_limit_seconds="x"), "no number of seconds"),
        (dict(example_inputs=torch.zeros(4, 8)), "pass a dict"),
    ],
)
def test_what_is_wrong_is_said_before(change: dict[str, Any], line: str, new_machine: Path) -> None:
    call: dict[str, Any] = dict(model=nn.Linear(8, 8), cluster="local:1", example_inputs=BATCH)
    with pytest.raises(autopar.AutoparError, match=line):
        autopar.parallelize(**call | change)


@pytest.mark.parametrize("words", [["--optimizer", "nope"], ["--force", "tp=2,tp=4"], ["--batch", "7"]])
def test_so_does_the_command_line(words: list[str], new_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "no-model" if words[0] == "--batch" else "gpt2-tiny"
    assert main(["plan", model, "--cluster", "local:2", *words]) == 2
    assert "measuring" not in capsys.readouterr().err


def test_measuring_says_what_and_how_long(new_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Measured):
        main(["plan", "gpt2-tiny", "--cluster", "local:2", "--batch", "4"])
    assert "measuring this machine as local:2, about 10 s, once" in capsys.readouterr().err


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autopar"
    for not_a_place in ("", "relative"):  # as the XDG specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", not_a_place)
        assert cache_folder() == Path.home() / ".cache" / "autopar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "autopar"


def test_a_quick_measurement_leaves_what_is_late(ranks: Any) -> None:
    """Each kind is timed at least once, and where time is over, only once."""
    assert quick_effort().total_seconds == QUICK_SECONDS == 10.0
    assert ranks.run(_calls_of_late_rounds, world=2) == [1, 1]


def _calls_of_late_rounds() -> int:
    from autopar.cost_models.calibrate.measure_rank import TimedCall

    task = TimedCall("task", 1.0, lambda: None)
    bench = RankBenchmark(torch.device("cpu"), quick_effort(), 1.0, 1.0, lambda line: None, time.time() - 11.0)
    bench.rounds("operations", [task], (0.0, 0.5))
    return len(task.clock)


def test_calibrate_without_a_file_refines_the_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measured is what ``local:N`` means from then on."""
    from autopar.cli.commands import calibrate
    from autopar.cli.console import Console

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = local_cluster.measured_local_cluster(2, Path.home() / ".cache" / "autopar")
    asked = argparse.Namespace(output=None, processes=2, levels=(), json=False, report=None)

    def thorough(processes: int, *given: Any) -> Any:
        from support.harness.home import measured

        return measured(processes)

    monkeypatch.setattr(local_cluster, "measure_local", thorough)
    assert calibrate.run(asked, Console()) == 0
    assert len(list((tmp_path / "autopar").iterdir())) == 1
    monkeypatch.setattr(local_cluster, "measure_local", lambda *given: pytest.fail("measured again"))
    assert autopar.Cluster.parse("local:2", cache=tmp_path / "autopar").name == before.name
