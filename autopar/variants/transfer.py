"""Takes over the decisions of a plan for a graph of the same structure and other sizes (another length, another batch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.graph import Block, Call, Graph
from autopar.ir.interface import Output


def in_structure_of(graph: Graph, planned: Graph) -> Graph | None:
    """`graph` with the blocks and calls of `planned`, whose operations it must have, one for one; None where it has others.

    A plan's graph may have several blocks for one captured block, where pipeline stages have plans of their own.
    """
    if len(graph.calls) != len(planned.calls) or len(graph.inputs) != len(planned.inputs):
        return None
    names = {value.name: other.name for value, other in zip(graph.inputs, planned.inputs, strict=True)}
    blocks: dict[str, Block] = {}
    theirs = {block.name: block for block in planned.blocks}
    own = {block.name: block for block in graph.blocks}
    for call, other in zip(graph.calls, planned.calls, strict=True):
        block = own[call.block]
        if blocks.setdefault(other.block, block) is not block or not _same_call(call, other, names):
            return None
    if any(not _same_block(block, theirs[name]) for name, block in blocks.items()):
        return None
    results = names.get(graph.loss) == planned.loss and len(graph.outputs) == len(planned.outputs)
    if not results or any(names.get(a.value) != b.value for a, b in zip(graph.outputs, planned.outputs, strict=True)):
        return None
    inputs = tuple(replace(value, name=names[value.name]) for value in graph.inputs)
    renamed = [replace(block, name=name) for name, block in blocks.items()]
    order = [block.name for block in planned.blocks]
    return replace(
        graph,
        inputs=inputs,
        blocks=tuple(sorted(renamed, key=lambda block: order.index(block.name))),
        calls=planned.calls,
        loss=planned.loss,
        outputs=tuple(Output(each.path, names[each.value], each.kind) for each in graph.outputs),
    )


def _same_call(call: Call, other: Call, names: dict[str, str]) -> bool:
    """Whether both calls read and make values at the same places; adds what they make to `names`."""
    if (call.prefix, call.parameters) != (other.prefix, other.parameters) or len(call.outputs) != len(other.outputs):
        return False
    if [names.get(name) for name in call.inputs] != list(other.inputs):
        return False
    names.update(zip(call.outputs, other.outputs, strict=True))
    return True


def _same_block(block: Block, other: Block) -> bool:
    return list(_lines(block)) == list(_lines(other))


def _lines(block: Block) -> Iterator[object]:
    """All of a block but its sizes, names of blocks, and source lines."""
    yield block.outputs, block.updates
    for parameter in block.parameters:
        yield parameter.value, parameter.path, parameter.trainable, parameter.buffer
    yield [(value.name, len(value.shape), value.dtype, value.differentiable) for value in block.inputs]
    for node in block.nodes:
        yield node.op, node.operands(), node.no_grad, [key for key, _ in node.kwargs]
        yield [(value.name, len(value.shape), value.dtype, value.differentiable) for value in node.outputs]
