"""Saves a checkpoint: torch's planner says which rank writes which part of each tensor, each rank writes and syncs one file, and
rank 0 writes the objects and, last, the manifest, and gives the folder its name.

An asynchronous save leaves the steps alone: it writes copies on the host, in a thread of low priority.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.optim import Optimizer

from ..device.mesh import UNFINISHED
from ..device.rng import SEEDED, seed_stream
from ..errors import CheckpointProblem, one_line
from . import folders
from .folders import next_branch
from .held import HeldState, describe, merged
from .manifest import MANIFEST, OBJECTS, Chunk, Manifest, StoredTensor
from .random_state import RandomState, generators
from .rounds import Failed, Rounds, attempt
from .tensor_file import FileEntry, check_plain, dtype_name, object_bytes, write_bytes, write_tensors

_NICER = 15
"""Linux: a thread that is nicer by so much gets a thirtieth of a core that a step wants, and all of one that nobody wants."""


class HostCopies:
    """Host memory that stays from one asynchronous save to the next: fresh pages take ten times the seconds of the copy."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy of all, which hold until the next call."""
        if [(each.shape, each.dtype) for each in self.kept] != [(each.shape, each.dtype) for each in tensors]:
            self.kept = []  # freed before the others are made
            self.kept = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        for own, tensor in zip(self.kept, tensors, strict=True):
            own.copy_(tensor.detach())
        return self.kept


def yield_to_others() -> None:
    """This thread computes only where the others of the machine leave a core. On other systems than Linux nothing."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICER))


LOGGER = logging.getLogger("autopar")


class Collected(NamedTuple):
    """The tensors that a rank writes: named tensors, of which `items` says the parts, into the folder `aside`; and on rank 0 the
    objects, where each tensor's parts are, and after which checkpoint this one comes."""

    aside: Path
    items: Sequence[WriteItem]
    tensors: Sequence[torch.Tensor]
    objects: bytes
    metadata: Metadata | None
    before: Path | None = None


class PendingSave:
    """A checkpoint that is being written, or is finished. `wait` returns its folder. `speaks`: this process logs a failure."""

    def __init__(self, work: Callable[[], Path], asynchronous: bool, speaks: bool = True) -> None:
        self.work, self.path, self.error = work, Path(), None
        self.thread: threading.Thread | None = None
        self.speaks = speaks
        if asynchronous:
            self.thread = threading.Thread(target=self._run, name="autopar checkpoint")
            UNFINISHED.add(self)
            self.thread.start()
        else:
            self.path = work()

    path: Path
    error: Exception | None

    def _run(self) -> None:
        yield_to_others()
        try:
            self.path = self.work()
            UNFINISHED.discard(self)
        except Exception as error:
            self.error = error
            if self.speaks:
                LOGGER.warning("a checkpoint was not saved: %s", one_line(str(error)))

    @property
    def done(self) -> bool:
        """Return whether nothing is being written any more."""
        return self.thread is None or not self.thread.is_alive()

    def wait(self) -> Path:
        """The folder of the checkpoint, once it is finished. CheckpointProblem where it could not be written."""
        if self.thread is not None:
            self.thread.join()
            UNFINISHED.discard(self)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.path


def collect(
    held: HeldState,
    rounds: Rounds,
    folder: Path,
    optimizers: Sequence[Optimizer],
    *,
    step: int,
    extra: Mapping[str, Any] | None,
    before: Path | None = None,
) -> Collected:
    """The first half of a save, which reads the state and writes nothing but an empty folder. `before`: the checkpoint
    that was saved or loaded last. All ranks call it together; CheckpointProblem on all of them."""
    with rounds.together():
        described = [describe(held, each, index) for index, each in enumerate(optimizers)]
    every = [merged(held.on_all_stages(each)) for each, _ in described]
    tensors = {name: each for name, each in held.model_tensors().items() if held.writes(name.removeprefix("model."))}
    for index, (kept, state_tensors) in enumerate(described):
        for name in kept["state"]:
            if held.writes(name):
                tensors |= {key: each for key, each in state_tensors.items() if key.startswith(f"optimizer{index}.{name}.")}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=rounds.rank == 0)
    change = (0, 0, 0) if held.mesh is None else held.mesh.seed_change()  # which the next call would follow
    own = generators(held.device), seed_stream.place, change
    with rounds.together():
        local = _local_plan(planner)
    reports = rounds.gather((step, local, own))
    first: Any = None
    if rounds.rank == 0:
        pending, seed, place = (max(each[2][at] for _, _, each in reports) for at in range(3))
        place = place if pending else max(each[1] for _, _, each in reports)
        seed = seed if pending == SEEDED else held.seed
        random = RandomState.of_all([each[0] for _, _, each in reports], seed, place).to_dict()
        kept = {"extra": extra, "model_extra": dict(held.extra), "optimizers": every, "random": random, "plan": held.plan}
        first = attempt(lambda: _prepare(rounds, planner, reports, folder, step, kept))
    shares = [first] * rounds.size if isinstance(first, Failed) else [(first[0], plan) for plan in first[1]] if first else []
    share = rounds.scatter(shares)
    if isinstance(share, Failed):
        raise CheckpointProblem(share.text)
    plan = planner.finish_plan(share[1])
    parts: list[torch.Tensor] = [planner.resolve_data(item) for item in plan.items]  # type: ignore[misc]
    return Collected(share[0], plan.items, parts, first[3] if first else b"", first[2] if first else None, before)


def _local_plan(planner: DefaultSavePlanner) -> SavePlan:
    """Return the parts that this rank could write; those without elements only of tensors without elements."""
    plan, items = planner.create_local_plan(), list[WriteItem]()
    for item in plan.items:
        if (data := item.tensor_data) is not None:
            dtype_name(data.properties.dtype)
            items += [item] * (prod(data.chunk.sizes) > 0 or prod(data.size) == 0)
    return replace(plan, items=items)


def _prepare(
    rounds: Rounds, planner: DefaultSavePlanner, reports: Sequence[Any], folder: Path, step: int, plain: Mapping[str, Any]
) -> tuple[Path, list[SavePlan], Metadata, bytes]:
    """Prepare on rank 0: the folder, the plan of each rank, and the objects."""
    other = next((rank for rank, (number, *_) in enumerate(reports) if number != step), None)
    if other is not None:
        raise CheckpointProblem(
            f"{rounds.describe(other)} saves step {reports[other][0]}, and rank 0 step {step}: save the same step on all ranks"
        )
    check_plain({"extra": plain["extra"]} if not isinstance(plain["extra"], dict) else plain["extra"], "extra")
    check_plain(plain["model_extra"], "the model's extra state")
    for each in plain["optimizers"]:
        for group in each["groups"]:
            check_plain(group["options"], f"a group of {each['class']}")
    content = object_bytes(plain)
    plans, metadata = planner.create_global_plan([plan for _, plan, _ in reports])
    return folders.begin(folder, step), plans, metadata, content


def write(collected: Collected, rounds: Rounds, *, step: int, axes: Mapping[str, int], keep: int | None) -> Path:
    """The second half; its path. All ranks call it together; CheckpointProblem on all of them where one of them cannot write, and
    then nothing is left of the checkpoint."""
    name = f"rank_{rounds.rank:05d}.safetensors"
    names = [f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}" for item in collected.items]
    try:
        with rounds.together():
            entry, starts = write_tensors(collected.aside / name, list(zip(names, collected.tensors, strict=True)))
        reports = rounds.gather((entry, starts, [item.index for item in collected.items]))
        return rounds.on_first(lambda: _finish(collected, reports, step, axes, keep))
    except CheckpointProblem as problem:
        if rounds.rank == 0:
            folders.discard(collected.aside)
        raise CheckpointProblem(
            f"cannot write the checkpoint {collected.aside.parent / folders.folder_name(step)}: {problem}; those before are as "
            "they were: make room, or name another folder"
        ) from None


def _finish(collected: Collected, reports: Sequence[Any], step: int, axes: Mapping[str, int], keep: int | None) -> Path:
    """Finish on rank 0: the objects, the manifest, the name."""
    files: dict[str, FileEntry] = {}
    places: dict[tuple[str, torch.Size], tuple[str, int]] = {}
    for rank, (entry, starts, indices) in enumerate(reports):
        name = f"rank_{rank:05d}.safetensors"
        path = collected.aside / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise CheckpointProblem(f"rank 0 does not see {path}, which rank {rank} wrote: name a folder that all nodes share")
        files[name] = entry
        places |= {(index.fqn, index.offset): (name, start) for index, start in zip(indices, starts, strict=True)}
    files[OBJECTS] = write_bytes(collected.aside / OBJECTS, collected.objects)
    assert collected.metadata is not None
    tensors: dict[str, StoredTensor] = {}
    for name, each in collected.metadata.state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        chunks = tuple(Chunk(tuple(c.offsets), tuple(c.sizes), *places[name, c.offsets]) for c in each.chunks)
        tensors[name] = StoredTensor(dtype_name(each.properties.dtype), tuple(each.size), chunks)
    folder = collected.aside.parent
    branch = next_branch(folders.candidates(folder), collected.before, folder)
    manifest = Manifest(step, len(reports), dict(axes), str(torch.__version__), files, tensors, *branch)
    write_bytes(collected.aside / MANIFEST, manifest.to_bytes())
    path = folders.finish(collected.aside, step)
    if keep is not None:
        failed = attempt(lambda: folders.keep_newest(path.parent, keep, path))
        if isinstance(failed, Failed):
            LOGGER.warning("cannot remove an old checkpoint of %s: %s", path.parent, failed.text)
        elif failed:
            names = ", ".join(each.name for each in failed)
            LOGGER.warning("removed %s of %s, which this training had left: keep=%d are kept", names, path.parent, keep)
    return path
