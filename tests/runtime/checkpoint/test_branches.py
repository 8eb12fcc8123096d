"""Going back to an earlier checkpoint: what is newest, what is kept, and what is said of what is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import nn

import autopar
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.entry import Checkpoints
from autopar.runtime.checkpoint.held import held_by_plain
from autopar.runtime.checkpoint.loading import load
from autopar.runtime.checkpoint.rounds import Rounds
from autopar.runtime.checkpoint.saving import collect, write


class Training:
    """Saves and goes back as `parallel.save` and `parallel.load` do, without a process group."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, Checkpoints()

    def save(self, step: int, keep: int | None = None) -> None:
        held, rounds = held_by_plain(nn.Linear(2, 2)), Rounds(None, str)
        collected = collect(held, rounds, self.folder, [], step=step, extra=None, before=self.checkpoints.last)
        self.checkpoints.last = write(collected, rounds, step=step, axes={}, keep=keep)

    def load(self, step: int | None = None) -> int:
        self.checkpoints.last = folders.candidates(self.folder, step)[0]
        return int(self.checkpoints.last.name[5:])

    @property
    def steps(self) -> list[int]:
        return [int(path.name[5:]) for path in folders.candidates(self.folder)]


def after_going_back(folder: Path, keep: int | None) -> Training:
    training = Training(folder)
    for step in (2, 4, 6, 8):
        training.save(step)
    assert training.load(4) == 4
    training.save(5, keep=keep)
    return training


def test_the_newest_is_what_was_written_last(tmp_path: Path) -> None:
    training = after_going_back(tmp_path, None)
    assert training.steps == [5, 4, 2, 8, 6], "then those that the training came by"
    assert Training(tmp_path).load() == 5


def test_the_branch_that_is_trained_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = after_going_back(tmp_path, 2)
    assert training.steps == [5, 4]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step_00000008, step_00000006" in line and "which this training had left" in line and "keep=2" in line
    training.save(6, keep=2)
    assert training.steps == [6, 5] and Training(tmp_path).load() == 6


def test_what_is_removed_in_turn_is_said_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path)
    with caplog.at_level(logging.INFO, "autopar"):
        for step in (1, 2, 3):
            training.save(step, keep=2)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "step_00000001" in caplog.records[0].getMessage()


def test_a_step_of_the_left_branch_is_written_again(tmp_path: Path) -> None:
    training = after_going_back(tmp_path, None)
    training.save(6)
    assert training.steps == [6, 5, 4, 2, 8]


def test_a_damaged_newest_gives_way_to_its_ancestor(tmp_path: Path) -> None:
    """Not to the branch that was left; and one with a damaged manifest is looked at first, which says so, and takes no place."""
    training = after_going_back(tmp_path, None)
    folder = tmp_path / folders.folder_name(5)
    (folder / "rank_00000.safetensors").write_bytes(b"")
    held, rounds = held_by_plain(nn.Linear(2, 2)), Rounds(None, str)
    found = load(held, rounds, tmp_path, [], step=None)
    assert found is not None and found.step == 4
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-9])
    assert training.steps[0] == 5
    training.checkpoints.last = tmp_path / folders.folder_name(4)
    training.save(7, keep=2)
    assert training.steps == [7, 4]


def test_checkpoints_of_an_older_autopar_are_ordered_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)
    with monkeypatch.context() as older:
        older.setattr("autopar.runtime.checkpoint.saving.next_branch", lambda *given: (0, ()))
        for step in (2, 4, 10):
            training.save(step)
    assert training.steps == [10, 4, 2]
    training.load(4)
    training.save(5)
    assert training.steps[0] == 5


def going_back(folder: str) -> list[tuple[int, list[str]]]:
    """On a rank: the same by `parallel.save` and `parallel.load`, at once and by a thread."""
    from torch import distributed as dist

    torch.manual_seed(0)
    parallel = autopar.parallelize(nn.Linear(4, 4), "local:2", (torch.zeros(4, 4),), force="dp=2", cache=False)
    out = []
    for asynchronous in (False, True):
        own = Path(folder, str(asynchronous))
        for step in (2, 4, 6, 8):
            parallel.save(own, step=step, asynchronous=asynchronous)
        assert parallel.load(own, step=4)
        parallel.save(own, step=5, keep=2, asynchronous=asynchronous).wait()
        dist.barrier()
        found = parallel.load(own)
        assert found is not None
        out.append((found.step, sorted(path.name for path in own.iterdir())))
        dist.barrier()
    return out


def test_ranks_that_go_back(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(going_back, str(tmp_path), world=2):
        assert said == [(5, ["step_00000004", "step_00000005"])] * 2


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(autopar.StateError, match="file is a file: name a folder"):
        Training(tmp_path / "file").save(1)


def other_plans(folder: str) -> list[list[str]]:
    """On a rank: what is logged by a load under the same plan, and under another one of as many processes."""
    out: list[list[str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            out[-1].append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("autopar").addHandler(handler)
    for force in ("dp=2", "dp=2", "tp=2"):
        torch.manual_seed(0)
        parallel = autopar.parallelize(nn.Linear(4, 4), "local:2", (torch.zeros(4, 4),), force=force, cache=False)
        out.append([])
        if not parallel.load(folder):
            parallel.save(folder, step=1)
    logging.getLogger("autopar").removeHandler(handler)
    return out


def test_another_plan_of_as_many_processes_is_said(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(other_plans, str(tmp_path), world=2)
    assert second == [[], [], []] and first[:2] == [[], []]
    (line,) = first[2]
    assert "under another plan, dp=2" in line and "now it is tp=2" in line and "plan=path" in line
