"""The layout of a job's weights: which part of each full tensor every rank holds, and where in its own tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from ..device.mesh import MeshHandle
from ..errors import TransferProblem
from ..state.layout import local_shape, shard_specs
from ..state.parameter_table import ParameterIndex

Span = tuple[int, int]
"""The first position and the number of positions, along one dimension."""

Spans = tuple[tuple[Span, ...], ...]
"""The part of a tensor that a rank holds: the product of these positions of each dimension, in the order in which it has them."""


class AxisShard(NamedTuple):
    """A sharding of a dimension over a mesh axis, of what the shardings before it left. The dimension is divided into `parts`,
    and each of them over the axis, of whose ranks `copies` neighbours hold the same. With a `width` each rank holds so many
    positions, and the last ones fewer or none."""

    axis: str
    dim: int
    parts: int = 1
    copies: int = 1
    width: int = 0

    def windows(self, extent: int, axis_size: int, coordinate: int) -> Iterator[Span]:
        """Yield the positions of one rank in a dimension of `extent`."""
        ranks, place = axis_size // self.copies, coordinate // self.copies
        if self.width:
            start = min(place * self.width, extent)
            yield start, min(self.width, extent - start)
            return
        part = extent // self.parts
        yield from ((at * part + place * (part // ranks), part // ranks) for at in range(self.parts))


class TensorLayout(NamedTuple):
    """A tensor of the model: its dtype, its shape, its shardings in their order, and the pipeline stages that hold it (none:
    all). `fused`: the tensor of the job of which it is a part, along dimension 0, after those that the layout lists before it.
    A `buffer` that only the sender lists stays there."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[AxisShard, ...] = ()
    stages: tuple[int, ...] = ()
    fused: str = ""
    buffer: bool = False

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


class WeightLayout(NamedTuple):
    """The tensors of a job by name, and its mesh axes, outermost first; ranks are numbered in row-major order."""

    axes: Mapping[str, int]
    tensors: Mapping[str, TensorLayout]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    def spans(self, tensor: TensorLayout, rank: int) -> Spans | None:
        """Return what a rank holds of a tensor; None where its stage has none of it."""
        place, left = {}, rank
        for axis, size in reversed(list(self.axes.items())):
            left, place[axis] = divmod(left, size)
        if tensor.stages and place["pp"] not in tensor.stages:
            return None
        spans: list[tuple[Span, ...]] = [((0, extent),) for extent in tensor.shape]
        for shard in tensor.shards:
            extent = sum(length for _, length in spans[shard.dim])
            windows = shard.windows(extent, self.axes[shard.axis], place[shard.axis])
            spans[shard.dim] = tuple(each for start, length in windows for each in cut(spans[shard.dim], start, start + length))
        return tuple(spans)

    def views(self, rank: int, tensors: Mapping[str, torch.Tensor], *, sends: bool = False) -> dict[str, torch.Tensor]:
        """Return the tensors of the model in those of a rank, by name. TransferProblem where the rank has others than the layout;
        one that `sends` may have them in another dtype."""
        out: dict[str, torch.Tensor] = {}
        left = dict(tensors)
        for name, tensor in self.tensors.items():
            spans, own = self.spans(tensor, rank), tensor.fused or name
            if spans is None:
                continue
            if own not in left:
                raise TransferProblem(
                    f"rank {rank} has no {own}, which the layout of its weights lists: pass all tensors of the model"
                )
            shape, local = tuple(sum(length for _, length in each) for each in spans), left[own]
            if tensor.fused and local.dim() and shape[0] <= len(local):
                local, left[own] = local.split((shape[0], len(local) - shape[0]))
            for shard in tensor.shards:
                if shard.width and local.shape[shard.dim] == shard.width:  # the last ranks have padding
                    local = local.narrow(shard.dim, 0, shape[shard.dim])
            if tuple(local.shape) != shape or not (sends or local.dtype == getattr(torch, tensor.dtype)):
                raise TransferProblem(
                    f"{name} is {str(local.dtype)[6:]} {tuple(local.shape)} on rank {rank}, and {tensor.dtype} {shape} in the "
                    "layout of its weights: make that for this model, and convert by send_weights(dtype=)"
                )
            out[name] = local
        names = {tensor.fused or name for name, tensor in self.tensors.items()}
        fused = {tensor.fused for tensor in self.tensors.values() if tensor.fused}
        if unknown := sorted(own for own in left if own not in names or (own in fused and len(left[own]))):
            raise TransferProblem(f"rank {rank} has {unknown[0]}, of which the layout of its weights lists less or nothing")
        return out

    def to_json(self) -> str:
        """Return the layout as text."""
        return json.dumps([self.axes, self.tensors], separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> WeightLayout:
        """The inverse."""
        axes, tensors = json.loads(text)
        return WeightLayout(axes, {name: _tensor(*each) for name, each in tensors.items()})


def _tensor(dtype: str, shape: list[int], shards: list[Any], stages: list[int], *rest: Any) -> TensorLayout:
    return TensorLayout(dtype, tuple(shape), tuple(AxisShard(*each) for each in shards), tuple(stages), *rest)


_Run = TypeVar("_Run", bound=tuple[int, ...])


def cut(runs: Iterable[_Run], begin: int, end: int) -> Iterator[_Run]:
    """Yield the positions `begin` to `end` of runs that follow each other, each of one or several first positions and a
    length."""
    position = 0
    for *firsts, length in runs:
        low, high = max(position, begin), min(position + length, end)
        if low < high:
            yield (*(first + low - position for first in firsts), high - low)  # type: ignore[misc]
        position += length


def layout_of_program(
    mesh: MeshHandle, index: ParameterIndex, zero_dims: Mapping[str, int | None], dtype: torch.dtype | None = None
) -> WeightLayout:
    """Return the layout of a program's parameters and buffers, with floating-point ones in `dtype` unless that is None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TransferProblem(f"dtype={dtype!r} is no floating-point dtype: pass one of torch, such as torch.bfloat16")
    tensors = {}
    for name, spec in index.specs.items():
        own: torch.dtype = getattr(torch, spec.dtype)
        sent = dtype if dtype is not None and own.is_floating_point else own
        stages = index.holders[name] if mesh.pp.size > 1 else ()
        shards: list[AxisShard] = []
        if not spec.buffer:
            shards = [AxisShard(each.axis, each.dim, each.parts) for each in shard_specs(spec.shape, spec.placements, mesh)]
            if (dim := zero_dims[name]) is not None:
                width = -(-local_shape(spec.shape, spec.placements, mesh)[dim] // mesh.shard_axis.size)
                shards.append(AxisShard(mesh.shard_axis.name, dim, width=width))
        text = str(sent).removeprefix("torch.")
        tensors[name] = TensorLayout(text, tuple(spec.shape), tuple(shards), tuple(stages), buffer=spec.buffer)
    return WeightLayout({**mesh.pipeline_axes, **mesh.state_axes}, tensors)
