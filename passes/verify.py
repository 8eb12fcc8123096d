"""What every pass must keep: single assignment, known shapes and placements. Named culprits."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir import dims
from autopar.ir.dims import Shape
from autopar.ir.graph import Node, Value
from autopar.ir.placement import Shard
from autopar.passes.base import CONVERT, CONVERT_MANY, Context, Stage, kwarg


def verify(stage: Stage, context: Context, culprit: str) -> None:
    """AssertionError that names the pass, the block and the value at the first thing that is not valid."""
    for problem in problems(stage, context):
        raise AssertionError(f"after {culprit}, block {stage.block.name}: {problem}")


def problems(stage: Stage, context: Context) -> Iterator[str]:
    """Everything that is wrong with a stage."""
    block = stage.block
    seen: dict[str, Value] = {}
    for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
        yield from _defined(value, seen, stage, context)
    for node in block.nodes:
        yield from (f"{node.name} reads %{name} before it is made" for name in node.operands() if name not in seen)
        if not node.outputs:
            yield f"{node.op} makes nothing"
        for value in node.outputs:
            yield from _defined(value, seen, stage, context)
        if stage.local and node.op in (CONVERT, CONVERT_MANY):
            yield from _conversion(node, seen, stage, context)
    yield from (f"output %{name} is never made" for name in block.outputs if name not in seen)
    buffers = {parameter.value.name for parameter in block.parameters}
    for buffer, name in block.updates:
        if buffer not in buffers:
            yield f"update of %{buffer}, which is no buffer of the block"
        if name not in seen:
            yield f"update with %{name}, which is never made"


def _defined(value: Value, seen: dict[str, Value], stage: Stage, context: Context) -> Iterator[str]:
    if value.name in seen:
        yield f"%{value.name} is made twice"
    seen[value.name] = value
    placements = stage.placements.get(value.name)
    if placements is None or len(placements) != len(context.mesh.axes):
        yield f"%{value.name} has no placement"
    for dim in value.shape:
        try:
            size = dims.value(dim, context.batch) if stage.local else 1
        except ValueError as error:
            yield f"%{value.name}: {error}"
        else:
            if size < 0:
                yield f"%{value.name} has a negative size {dim}"


def _conversion(node: Node, seen: dict[str, Value], stage: Stage, context: Context) -> Iterator[str]:
    """The local shape changes as the move says."""
    axis = kwarg(node, "axis")
    index, size = context.mesh.index(axis), context.mesh.size_of(axis)
    for source, result in zip(node.operands(), node.outputs, strict=True):
        expected: Shape = seen[source].shape
        before, after = stage.placements[source][index], stage.placements[result.name][index]
        if isinstance(before, Shard):
            expected = _scaled(expected, before.dim, size, 1)
        if isinstance(after, Shard):
            expected = _scaled(expected, after.dim, 1, size)
        if dims.values(expected, context.batch) != dims.values(result.shape, context.batch):
            had, found = list(seen[source].shape), list(result.shape)
            yield f"%{result.name} is {found} but {before} -> {after} of {had} is {list(expected)}"


def _scaled(shape: Shape, dim: int, times: int, by: int) -> Shape:
    out = list(shape)
    out[dim] = dims.simplify(dims.expression(out[dim]) * times / by)
    return tuple(out)
