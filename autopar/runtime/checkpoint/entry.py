"""``parallel.save`` and ``parallel.load``, and the same checkpoints for a plain model on one process. Start here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..device.groups import control_group
from ..errors import CheckpointProblem
from ..progress import working
from .folders import check_step
from .held import HeldState, Optimizers, as_optimizers, held_by_plain
from .loading import LoadedCheckpoint, load
from .rounds import Rounds
from .saving import HostCopies, PendingSave, collect, write


class Checkpoints:
    """The checkpoints of a parallel model: the save that goes on, the memory that it writes from, and the groups of all ranks,
    which are made at first use. `last`: the one that was saved or loaded last, from which this training goes on."""

    pending: PendingSave | None = None
    last: Path | None = None
    control: dist.ProcessGroup | None = None
    writing: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self.copies = HostCopies()

    def rounds(self, describe: Callable[[int], str]) -> Rounds:
        """Return the collectives of the main thread. All ranks call it together."""
        if self.control is None and dist.get_world_size() > 1:
            self.control = control_group()
        return Rounds(self.control, describe)

    def writing_rounds(self, describe: Callable[[int], str]) -> Rounds:
        """Return those of the thread that writes, beside the collectives of the step. All ranks call it together."""
        if self.writing is None and dist.get_world_size() > 1:
            self.writing = dist.new_group(backend="gloo")
        return Rounds(self.writing, describe)

    def wait(self) -> None:
        """Wait until the last save is finished. CheckpointProblem where it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
            self.last = pending.path

    def save(
        self,
        held: HeldState,
        folder: str | os.PathLike[str],
        optimizer: Optimizers,
        describe: Callable[[int], str],
        *,
        step: int,
        extra: Mapping[str, Any] | None,
        keep: int | None,
        asynchronous: bool,
    ) -> PendingSave:
        """Save the state of the model. All ranks call it together."""
        check_step(step, keep)
        self.wait()
        rounds, path = self.rounds(describe), Path(folder).absolute()
        collected = collect(held, rounds, path, as_optimizers(optimizer), step=step, extra=extra, before=self.last)
        if not asynchronous:
            with working(f"saving step {step} to {folder}", sum(each.nbytes for each in collected.tensors)):
                done = PendingSave(lambda: write(collected, rounds, step=step, axes=held.axes, keep=keep), False)
            self.last = done.path
            return done
        later, own = collected._replace(tensors=self.copies.of(collected.tensors)), self.writing_rounds(describe)
        work = lambda: write(later, own, step=step, axes=held.axes, keep=keep)  # noqa: E731
        self.pending = PendingSave(work, True, speaks=own.rank == 0)
        return self.pending

    def load(
        self,
        held: HeldState,
        folder: str | os.PathLike[str],
        optimizer: Optimizers,
        describe: Callable[[int], str],
        *,
        step: int | None,
    ) -> LoadedCheckpoint | None:
        """Load into the model. All ranks call it together."""
        if step is not None:
            check_step(step, None)
        self.wait()
        loaded = load(held, self.rounds(describe), Path(folder).absolute(), as_optimizers(optimizer), step=step)
        self.last = loaded.path if loaded is not None else None
        return loaded


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
) -> LoadedCheckpoint | None:
    """Load what ``parallel.save`` wrote, under any plan, into the plain model and its optimizer on one process: weights,
    optimizer state, and the generators of torch, Python and numpy.

    `folder` is that of all checkpoints, of which the newest whole one is taken, or the one of `step`; or that of one checkpoint.
    None where the folder has none."""
    if hasattr(model, "checkpoints") and hasattr(model, "full_state"):
        raise CheckpointProblem("load_checkpoint is for the plain model: call parallel.load(folder, optimizer)")
    held, rounds = held_by_plain(model), Rounds(None, lambda rank: f"rank {rank}")
    return load(held, rounds, Path(folder).absolute(), as_optimizers(optimizer), step=step)
