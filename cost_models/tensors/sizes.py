"""Bytes of tensors, and how many ways placements shard them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import dims
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placements, Shard

_ITEMSIZE = {
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element; what is not listed (bool, int8, uint8, float8) takes one."""
    return _ITEMSIZE.get(dtype, 1)


def value_bytes(value: Value, batch: int) -> int:
    """Bytes of the global tensor at global batch `batch`."""
    return dims.numel(value.shape, batch) * itemsize(value.dtype)


def user_held_bytes(graph: Graph, batch: int, mesh: Mesh) -> float:
    """Bytes on one device of tensors that the user's loop holds during a step: the global batch, which every rank has, and the
    outputs beside the loss, of which a data rank has its shard (model axes are taken to shard nothing of it)."""
    given = sum(value_bytes(value, batch) for value in graph.inputs)
    asked, returned = {output.value for output in graph.outputs}, 0
    for call in graph.calls if asked else ():
        block = graph.block(call.block)
        made = {name: inner for name, inner in zip(call.outputs, block.outputs, strict=True) if name in asked}
        if made:
            values = block.values()
            returned += sum(value_bytes(values[inner], batch) for inner in made.values())
    return given + returned / mesh.size_of(DATA_AXIS)


def shard_count(placements: Placements, axis_sizes: Sequence[int]) -> int:
    """Return how many ways the placements shard a tensor."""
    count = 1
    for placement, size in zip(placements, axis_sizes, strict=True):
        if type(placement) is Shard:
            count *= size
    return count
