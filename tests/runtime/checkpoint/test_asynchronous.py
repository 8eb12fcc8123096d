"""Asynchronous saves that fail: told on all ranks by the next save, by `wait` and at the end, never taken for whole."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train

from autopar.runtime.errors import CheckpointProblem

WORLD = 2
WORDS = {
    "disk full": "No space left on device",
    "file too large": "File too large",
    "folder gone": "No such file or directory",
    "no permission": "Permission denied",
    "not a folder": "File exists",
}
"""Faults, and what the system says of each."""


class Writing:
    """Threads that write wait until the fault is there."""

    def __init__(self) -> None:
        from autopar.runtime.checkpoint import saving

        self.original, self.saving, self.ready = saving.write, saving, threading.Event()

        def write(*args: Any, **options: Any) -> Path:
            self.ready.wait(60)
            return self.original(*args, **options)

        from autopar.runtime.checkpoint import entry

        entry.write = write
        self.undo: Callable[[], None] = lambda: setattr(entry, "write", self.original)


@contextmanager
def fault(kind: str, folder: Path, rank: int) -> Iterator[None]:
    """On rank 1, of its file; the folders on rank 0."""
    aside = next(iter(folder.glob("*.tmp")), folder)
    opened, sync, limit = Path.open, os.fsync, resource.getrlimit(resource.RLIMIT_FSIZE)

    def refused(path: Path, *args: Any, **options: Any) -> Any:  # root may write everywhere
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1 and kind == "disk full":
        os.fsync = full
    if rank == 1 and kind == "file too large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    if rank == 1 and kind == "no permission":
        Path.open = refused  # type: ignore[method-assign]
    if rank == 0 and kind == "folder gone":
        shutil.rmtree(aside)
    if rank == 0 and kind == "not a folder":
        (aside / "rank_00001.safetensors").write_bytes(b"of another")
    try:
        yield
    finally:
        os.fsync = sync
        Path.open = opened  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def failing_saves(text: str, state: Any, batch: Any, folder: str, kinds: list[str]) -> list[tuple[str, list[str]]]:
    """On a rank: what the next save says after each fault, and the folder's checkpoints then."""
    import torch.distributed as dist

    parallel = parallel_model(text, state)
    optimizer = torch.optim.AdamW(parallel.parameters())
    train(parallel, [batch], optimizer)
    parallel.save(folder, optimizer, step=1)
    out, step = [], 1
    for kind in kinds:
        writing = Writing()
        try:
            parallel.save(folder, optimizer, step=step + 1, asynchronous=True)
            dist.barrier()
            with fault(kind, Path(folder), dist.get_rank()):
                dist.barrier()
                writing.ready.set()
                train(parallel, [batch], optimizer)
                try:
                    parallel.save(folder, optimizer, step=step + 2)
                    said = ""
                except CheckpointProblem as problem:
                    said = str(problem)
        finally:
            writing.undo()
        dist.barrier()
        found = sorted(path.name for path in Path(folder).iterdir())
        dist.barrier()
        step = parallel.save(folder, optimizer, step=step + 2, keep=1).path and step + 2
        assert parallel.load(folder, optimizer).step == step
        out.append((said, found))
        dist.barrier()
    return out


@pytest.mark.parametrize("kinds", [["disk full", "folder gone"], pytest.param(list(WORDS), marks=pytest.mark.slow)])
def test_the_next_save_tells(kinds: list[str], ranks: RankPool, tmp_path: Path) -> None:
    from support.chain_model import model_and_batch
    from support.harness.failing_run import PLANS

    import autopar
    from autopar.program.build import program_text

    model, batch = model_and_batch()
    plan = autopar.plan(model, f"local:{WORLD}", batch, force=PLANS["dp=4,zero=3"])
    text = program_text(plan.graph, plan.candidate)
    folder, state = tmp_path / "checkpoints", dict(model.state_dict())
    for told in ranks.run(failing_saves, text, state, batch, str(folder), kinds, world=WORLD):
        for number, (kind, (said, found)) in enumerate(zip(kinds, told, strict=True)):
            words = WORDS[kind]
            culprit = "rank 0" if kind == "folder gone" else "rank 1"
            assert words in said and culprit in said and said.isprintable(), f"{kind}: {said!r}"
            assert f"step_{2 * number + 2:08d}" in said and "those before are as they were" in said
            assert found == [f"step_{2 * number + 1:08d}"], (kind, found)


SCRIPT = """
import os, sys
import torch, autopar
from autopar.runtime.device.mesh import shut_down
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
batch = (torch.randn(4, 8),)
parallel = autopar.parallelize(model, "local", batch, force="FORCE")
parallel.save("checkpoints", step=1)
if sys.argv[1] == "fails" and os.environ["RANK"] == "1":
    def full(number):
        raise OSError(28, "No space left on device")
    os.fsync = full
parallel.save("checkpoints", step=2, asynchronous=True)
shut_down()
print("whole", flush=True)
"""


@pytest.mark.parametrize("word", ["fails", "writes"])
def test_the_end_waits_and_tells(word: str, ranks: RankPool, tmp_path: Path) -> None:
    """`shut_down` does not come back before the last checkpoint is whole."""
    from support.harness.failing_run import PLANS

    (tmp_path / "script.py").write_text(SCRIPT.replace("FORCE", PLANS["dp=4,zero=3"]))
    ended = launch(ranks, tmp_path / "script.py", WORLD, word)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [bool(each.status) for each in ended] == [word == "fails"] * WORLD, ended
    assert [each.stdout for each in ended] == ["" if word == "fails" else "whole\n"] * WORLD
    assert found == ["step_00000001"] + ["step_00000002"] * (word == "writes")
    for rank, each in enumerate(ended):
        told = [line for line in each.stderr.splitlines() if "CheckpointProblem" in line and "No space left on device" in line]
        assert bool(told) == (word == "fails"), each.stderr
        logged = "a checkpoint was not saved: " in each.stderr
        assert logged == (word == "fails" and rank == 0), each.stderr


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 64 KiB; asynchronous, on one process."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        _fill(small)
    finally:
        with suppress(OSError):
            subprocess.run(["umount", str(small)], check=False)


def _fill(small: Path) -> None:
    from autopar.runtime.checkpoint.entry import load_checkpoint
    from autopar.runtime.checkpoint.held import held_by_plain
    from autopar.runtime.checkpoint.rounds import Rounds
    from autopar.runtime.checkpoint.saving import HostCopies, PendingSave, collect, write

    model = torch.nn.Linear(60, 60)
    held, rounds, copies = held_by_plain(model), Rounds(None, str), HostCopies()
    for step in range(1, 5):
        later = collect(held, rounds, small / "checkpoints", [], step=step, extra=None)
        later = later._replace(tensors=copies.of(later.tensors))
        save = PendingSave(lambda later=later, step=step: write(later, rounds, step=step, axes={}, keep=None), True)  # type: ignore[misc]
        try:
            save.wait()
        except CheckpointProblem as problem:
            assert "No space left on device" in str(problem) and "make room" in str(problem) and str(problem).isprintable()
            break
    else:
        raise AssertionError("four checkpoints of 21 KiB fit into 64 KiB")
    found = load_checkpoint(small / "checkpoints", model)
    assert found is not None and found.step == step - 1 and not list((small / "checkpoints").glob("*.tmp"))
