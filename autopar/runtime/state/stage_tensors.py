"""Tensors of a pipeline, which some of its stages hold: the others have each of them too, without elements (`OnAnotherStage`), so
that a script does the same on all ranks, over one list of all parameters.

What is computed of tensors that a stage holds is on that stage as well. Where stages have to have a value of each other, all of
them get it at that place of the script (`on_all_stages`).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..comm.heartbeat import Heartbeat, watched
from ..compat.dtensor import gathered, over_local, with_local
from ..device.groups import shared
from ..device.mesh import MeshHandle

_PIPELINES: weakref.WeakValueDictionary[int, PipelineStages] = weakref.WeakValueDictionary()
"""By id, in the order in which all ranks make them."""


@dataclass
class StageReads:
    """The reads of values of stages since a model was made or called: their number, and a checksum of them. Models have one
    record, since a tensor from a file is of none of them."""

    number: int = 0
    checksum: int = 0

    def add(self, words: str) -> None:
        """Add a read."""
        self.number, self.checksum = self.number + 1, zlib.crc32(words.encode(), self.checksum)

    def clear(self) -> None:
        """Begin again."""
        self.number = self.checksum = 0


def stage_reads() -> StageReads:
    """The reads of this process."""
    return shared("reads of values of stages", StageReads)


class PipelineStages:
    """The stages of a pipeline, as the tensors of its parallel model know it."""

    def __init__(self, mesh: MeshHandle) -> None:
        self.mesh = mesh
        self.heartbeat: Heartbeat | None = None
        _PIPELINES[id(self)] = self
        if dist.is_initialized():
            stage_reads().clear()

    def __deepcopy__(self, _: Any) -> PipelineStages:
        """Itself: a copy of a parameter is on the same stages."""
        return self

    def receive(
        self, stage: int, size: int, dtype: torch.dtype, compute: Callable[[], torch.Tensor], *, awaited: bool
    ) -> torch.Tensor:
        """Return what that stage computes. All ranks call it in one order: values of one size would be taken for each other.
        `awaited`: the script waits for the values, on a GPU too, which it does here, where its heartbeat knows."""
        words = f"a read of {size} {str(dtype).removeprefix('torch.')} value{'s' * (size != 1)} of stage {stage}"
        stage_reads().add(words)
        with watched(self.heartbeat, words):
            here = self.mesh.pp.coordinate == stage
            value = compute() if here else torch.empty(size, dtype=dtype, device=self.mesh.device)
            numbers = torch.view_as_real(value) if value.is_complex() else value  # which NCCL has no broadcast of
            dist.broadcast(numbers, self.mesh.rank_in_stage(stage), self.mesh.group(self.mesh.pp.name))
            if awaited and value.is_cuda:
                torch.cuda.current_stream(value.device).synchronize()
        return value


class Holders(NamedTuple):
    """The stages that hold a tensor."""

    pipeline: PipelineStages
    stages: frozenset[int]

    def __deepcopy__(self, _: Any) -> Holders:
        return self

    def __reduce__(self) -> Any:
        """The stages alone, in what ``torch.load(weights_only=True)`` reads: the pipeline is that of the process which loads."""
        return Holders, (None, tuple(self.stages))

    @property
    def here(self) -> bool:
        """Whether this rank's stage is one of them."""
        return self.pipeline.mesh.pp.coordinate in self.stages


class OnAnotherStage(DTensor):
    """A tensor that other stages hold: its shape, dtype and device, without elements. Its values are fetched where they are
    read."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> OnAnotherStage:  # of what torch.compile traces
        return over_local(OnAnotherStage, DTensor.__tensor_unflatten__(inner, spec, size, stride))  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stages = ", ".join(map(str, sorted(holders.stages))) if (holders := holders_of(self)) else "?"
        return f"OnAnotherStage(shape={tuple(self.shape)}, dtype={self.dtype}, stage={stages})"

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:  # torch.distributed.checkpoint: its holders write it
        return []

    def __create_chunk_list__(self) -> list[Any]:
        return []


def holders_of(value: Any) -> Holders | None:
    """Return the stages that hold a tensor; None where all ranks have it, or there is no pipeline."""
    if not isinstance(value, DTensor):
        return None
    holders: Holders | None = value.__dict__.get("autopar_holders")
    if holders is not None and holders.pipeline is None:  # from a file
        pipeline = pipeline_of(value)
        holders = None if pipeline is None else Holders(pipeline, frozenset(holders.stages))
        value.__dict__["autopar_holders"] = holders
    return holders


def held_by(value: Any, holders: Holders | None) -> Any:
    """Note the stages that hold a tensor, and return it."""
    if holders is not None and isinstance(value, DTensor):
        value.__dict__["autopar_holders"] = holders
    return value


def pipeline_of(value: DTensor) -> PipelineStages | None:
    """Return a pipeline whose stage has the mesh of this tensor. Those of several models have the same groups of ranks."""
    return next((each for each in _PIPELINES.values() if each.mesh.state_mesh == value.device_mesh), None)


def on_another_stage(
    shape: Sequence[int], dtype: torch.dtype, holders: Holders, *, stride: Sequence[int] | None = None
) -> OnAnotherStage:
    """Return a tensor that `holders` hold, as the other stages have it."""
    mesh = holders.pipeline.mesh
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))] if stride is None else stride
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=mesh.device)
    out: OnAnotherStage = with_local(OnAnotherStage, empty, mesh.state_mesh, shape, strides)
    return held_by(out, holders)  # type: ignore[no-any-return]


def for_holders(target: DTensor, value: Any) -> Any:
    """Return a value that is written into `target` as its holders have it. All ranks call it."""
    own, theirs = holders_of(target), holders_of(value)
    return value if theirs is None or (own is not None and own.stages <= theirs.stages) else on_all_stages([value])[0]


def on_all_stages(values: Iterable[Any], *, awaited: bool = False) -> list[Any]:
    """Return each tensor that some stages hold as one that all ranks have, and all else itself. All ranks call it for the same
    ones, in any order of those with different holders (Python swaps the operands of ``a < b`` where one class is a subclass of
    the other's); those with the same holders and dtype go together. `awaited`: see `PipelineStages.receive`."""
    out = list(values)
    groups: dict[Any, list[int]] = {}
    for position, value in enumerate(out):
        if (holders := holders_of(value)) is not None:
            axes = tuple(holders.pipeline.mesh.whole_mesh.shape)
            groups.setdefault((axes, tuple(sorted(holders.stages)), str(value.dtype)), []).append(position)
    for (_, stages, _), positions in sorted(groups.items()):
        some = [out[position] for position in positions]
        pipeline = holders_of(some[0]).pipeline  # type: ignore[union-attr]
        sizes = [prod(each.shape) for each in some]
        parts = pipeline.receive(stages[0], sum(sizes), some[0].dtype, partial(_flat, some), awaited=awaited).split(sizes)
        for position, each, part in zip(positions, some, parts, strict=True):
            value = part.view(each.shape)
            out[position] = with_local(DTensor, value, each.device_mesh, value.shape, value.stride())
    return out


def _flat(values: Iterable[DTensor]) -> torch.Tensor:
    """The elements of tensors as their stage alone has them."""
    return torch.cat([gathered(over_local(DTensor, each)).reshape(-1) for each in values])
