"""Loads the newest whole checkpoint into a model of any plan: its files are verified first, then each rank reads its shards,
which torch's planner cuts from the parts that were written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.optim import Optimizer

from ..compat.dtensor import local_of
from ..device.rng import seed_stream
from ..errors import CheckpointProblem, DamagedCheckpoint, one_line
from ..progress import advance, working
from . import folders
from .held import HeldState, check_groups, grouped_names, set_state, state_from_manifest
from .manifest import MANIFEST, OBJECTS, Manifest
from .random_state import RandomState, set_generators
from .rounds import Rounds
from .tensor_file import check_file, mapped_tensor, object_of

LOGGER = logging.getLogger("autopar")


class LoadedCheckpoint(NamedTuple):
    """The contents of a checkpoint: the `step` and the `extra` that it was saved with, and its folder."""

    step: int
    extra: Any
    path: Path


class Verified(NamedTuple):
    """A checkpoint whose files are whole."""

    path: Path
    manifest: Manifest
    objects: Mapping[str, Any]


def load(
    held: HeldState, rounds: Rounds, folder: Path, optimizers: Sequence[Optimizer], *, step: int | None
) -> LoadedCheckpoint | None:
    """Load into the model and the optimizers, in place; None where the folder has no checkpoint. All ranks call it together.
    CheckpointProblem on all of them where none is whole, or where it is of another model or another optimizer."""
    try:
        paths = rounds.on_first(lambda: folders.candidates(folder, step))
    except CheckpointProblem as problem:
        raise CheckpointProblem(f"cannot read the folder {folder}: {problem}") from None
    first = ""
    for path in paths:
        try:
            verified = _verified(rounds, path)
        except CheckpointProblem as problem:
            first = first or str(problem)
            continue
        if first and rounds.rank == 0:
            LOGGER.warning("%s: loading %s, which is whole; remove the damaged one", first, path)
        return _take(held, rounds, verified, optimizers)
    if first:
        raise CheckpointProblem(
            f"{first}, and {folder} has no other checkpoint that is whole: name another folder, or remove it to begin anew"
        )
    if step is not None:
        raise CheckpointProblem(f"{folder} has no checkpoint of step {step}: leave step= out to load the newest")
    if rounds.rank == 0:
        LOGGER.info("%s has no checkpoint: nothing is loaded", folder)
    return None


def _verified(rounds: Rounds, path: Path) -> Verified:
    """Return the checkpoint, whose files each rank checks some of. CheckpointProblem on all ranks where one is not as it was
    written."""
    content = rounds.on_first(lambda: _content(path / MANIFEST))
    manifest = Manifest.from_bytes(content, path / MANIFEST)
    own = sorted(manifest.files)[rounds.rank :: rounds.size]
    with rounds.together(), working(f"checking {path}", sum(manifest.files[name].size for name in own)):
        for name in own:
            check_file(path / name, manifest.files[name])
    content = rounds.on_first(lambda: _content(path / OBJECTS))
    return Verified(path, manifest, _objects(content, path / OBJECTS))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read {path}: {error.strerror}") from None


def _objects(content: bytes, where: Path) -> Mapping[str, Any]:
    value = object_of(content, where)
    kinds = {"extra": object, "model_extra": dict, "optimizers": list, "random": dict}
    if not isinstance(value, dict) or any(not isinstance(value.get(key), kind) for key, kind in kinds.items()):
        raise DamagedCheckpoint(f"{where} has not what a checkpoint has")
    return value


def _take(held: HeldState, rounds: Rounds, verified: Verified, optimizers: Sequence[Optimizer]) -> LoadedCheckpoint:
    """Read what this rank has."""
    path, manifest, plain = verified
    with rounds.together():
        names = [grouped_names(held, each) for each in optimizers]
    saved: list[Any] = plain["optimizers"]
    states: list[dict[torch.Tensor, dict[str, Any]]] = []
    with rounds.together():
        if len(optimizers) > len(saved):
            raise CheckpointProblem(f"{path} has the state of {len(saved)} optimizers: save it with optimizer=, or load without")
        tensors = _checked_model(held, manifest, path)
        for index, optimizer in enumerate(optimizers):
            check_groups(names[index], held.mesh is None, optimizer, saved[index], index)
            state, parts = state_from_manifest(held, optimizer, saved[index], index, manifest)
            states.append(state)
            tensors |= parts
    with rounds.together(), working(f"loading {path}", sum(local_of(each).numel() for each in tensors.values())):
        _read(tensors, manifest, path)
    held.load_others({name: tensors[f"model.{name}"] for name in held.others if f"model.{name}" in tensors}, plain["model_extra"])
    for optimizer, state, described in zip(optimizers, states, saved, strict=False):
        set_state(optimizer, state, described)
        if described["class"] != type(optimizer).__name__ and rounds.rank == 0:
            LOGGER.warning("%s has the state of %s, and is loaded into %s", path, described["class"], type(optimizer).__name__)
    with rounds.together():
        _set_random_state(held, rounds, plain["random"])
    if rounds.rank == 0:
        _compare_plans(plain.get("plan"), held.plan, manifest.processes == rounds.size, path)
    return LoadedCheckpoint(manifest.step, plain["extra"], path)


def _compare_plans(saved: object, own: str, same_world: bool, path: Path) -> None:
    """A warning where as many processes have another plan than those that saved: dropout draws other numbers."""
    if same_world and own and isinstance(saved, str) and saved not in ("", own):
        LOGGER.warning(
            "%s was saved by as many processes under another plan, %s; now it is %s: keep one with plan.save(path) and plan=path",
            path, one_line(saved[:300]), own,
        )  # fmt: skip


def _checked_model(held: HeldState, manifest: Manifest, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model that are read. CheckpointProblem where the checkpoint is of another model."""
    absent = {f"model.{name}" for name in held.others} - manifest.tensors.keys()  # an exported program saves what it reads
    tensors = {name: tensor for name, tensor in held.model_tensors().items() if name not in absent}
    for name, tensor in tensors.items():
        stored, plain = manifest.tensors.get(name), name.removeprefix("model.")
        if stored is None:
            raise CheckpointProblem(f"{path} has no {plain}: build the model that was saved")
        if stored.shape != tuple(tensor.shape):
            raise CheckpointProblem(
                f"{plain} has shape {tuple(tensor.shape)}, and {stored.shape} in {path}: build the model that was saved"
            )
    return tensors


def _read(tensors: Mapping[str, torch.Tensor], manifest: Manifest, path: Path) -> None:
    """Fill the tensors of this rank, in place."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted = Manifest.metadata(manifest._replace(tensors={name: manifest.tensors[name] for name in tensors}))
    planner.set_up_planner(dict(tensors), wanted, False)
    places = {(name, c.offsets): c for name in tensors for c in manifest.tensors[name].chunks}
    left = {name: local_of(tensor).numel() for name, tensor in tensors.items()}
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            name = item.storage_index.fqn
            chunk = places[name, tuple(item.storage_index.offset or ())]
            part = mapped_tensor(path / chunk.file, chunk.start, manifest.tensors[name].torch_dtype, chunk.sizes)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            planner.resolve_tensor(item).copy_(part)
            advance(prod(item.lengths))
            left[name] -= prod(item.lengths)
    missing = next((name for name, count in left.items() if count), None)
    if missing is not None:
        raise DamagedCheckpoint(f"{path} has parts of {missing} that do not cover it")


def _set_random_state(held: HeldState, rounds: Rounds, saved: Mapping[str, Any]) -> None:
    random = RandomState.from_dict(saved)
    if random.moved(rounds.size) and rounds.rank == 0:
        LOGGER.warning(
            "%d processes saved different random states, and this run has %d: each goes on with that of its rank, new ones with "
            "one of their own",
            len(random.of_rank), rounds.size,
        )  # fmt: skip
    state, different = random.generators_of(rounds.rank)
    set_generators(state, held.device, different)
    if held.mesh is not None:
        if random.seed is not None:
            held.reseed(random.seed)
        seed_stream.restart(random.place)
