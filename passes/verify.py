"""Checks the IR after each pass: single assignment, known shapes and placements, shapes of conversions."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir import dims
from autopar.ir.dims import Shape
from autopar.ir.graph import Node, Value
from autopar.ir.placement import Shard
from autopar.operations.communication import CONVERT, CONVERT_MANY
from autopar.passes.base import BlockState, Context, text_kwarg


def verify(state: BlockState, context: Context, culprit: str) -> None:
    """AssertionError at the first problem, which names the pass (`culprit`), the block and the value."""
    for problem in problems(state, context):
        raise AssertionError(f"after {culprit}, block {state.block.name}: {problem}")


def problems(state: BlockState, context: Context) -> Iterator[str]:
    """Every violation of the invariants in `state`."""
    block = state.block
    seen: dict[str, Value] = {}
    for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
        yield from _defined(value, seen, state, context)
    for node in block.nodes:
        yield from (f"{node.name} reads %{name} before it is produced" for name in node.operands() if name not in seen)
        if not node.outputs:
            yield f"{node.op} has no output"
        for value in node.outputs:
            yield from _defined(value, seen, state, context)
        if state.local and node.op in (CONVERT, CONVERT_MANY):
            yield from _conversion(node, seen, state, context)
    yield from (f"output %{name} is never produced" for name in block.outputs if name not in seen)
    buffers = {parameter.value.name for parameter in block.parameters}
    for buffer, name in block.updates:
        if buffer not in buffers:
            yield f"update of %{buffer}, which is not a buffer of the block"
        if name not in seen:
            yield f"update with %{name}, which is never produced"


def _defined(value: Value, seen: dict[str, Value], state: BlockState, context: Context) -> Iterator[str]:
    if value.name in seen:
        yield f"%{value.name} is assigned twice"
    seen[value.name] = value
    placements = state.placements.get(value.name)
    if placements is None or len(placements) != len(context.mesh.axes):
        yield f"%{value.name} has no placement"
    for dim in value.shape:
        try:
            size = dims.size_at(dim, context.batch) if state.local else 1
        except ValueError as error:
            yield f"%{value.name}: {error}"
        else:
            if size < 0:
                yield f"%{value.name} has a negative size {dim}"


def _conversion(node: Node, seen: dict[str, Value], state: BlockState, context: Context) -> Iterator[str]:
    """The local shape of a conversion's result follows from its placements."""
    axis = text_kwarg(node, "axis")
    index, size = context.mesh.index(axis), context.mesh.size_of(axis)
    for source, result in zip(node.operands(), node.outputs, strict=True):
        expected: Shape = seen[source].shape
        before, after = state.placements[source][index], state.placements[result.name][index]
        if isinstance(before, Shard):
            expected = _scaled(expected, before.dim, size, 1)
        if isinstance(after, Shard):
            expected = _scaled(expected, after.dim, 1, size)
        if dims.shape_at(expected, context.batch) != dims.shape_at(result.shape, context.batch):
            had, found = list(seen[source].shape), list(result.shape)
            yield f"%{result.name} is {found} but {before} -> {after} of {had} is {list(expected)}"


def _scaled(shape: Shape, dim: int, times: int, by: int) -> Shape:
    out = list(shape)
    out[dim] = dims.as_dim(dims.as_sympy(out[dim]) * times / by)
    return tuple(out)
