"""The values that cross the borders between the model chunks of a pipeline, and those that each chunk can compute for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.graph import Graph, ancestors, batch_input, draws_masks, lacks_batch


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """Some nodes of one call, by the names of their first outputs, in order."""

    call: int
    nodes: tuple[str, ...]


def crossing_values(graph: Graph, chunks: Sequence[Sequence[int]], repeated: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Return for each border, between chunk c and c + 1, the values that are sent over it, in the order in which they are
    produced.

    Those are produced before it, read after it (outputs of the model: at the end), and not `repeated`. `chunks` are the calls of
    each chunk, which are consecutive. Inputs of the batch are on every rank.
    """
    out = []
    for chunk in chunks[1:]:
        first = chunk[0]
        read = {name for call in graph.calls[first:] for name in call.inputs} | set(graph.results)
        made = [name for call in graph.calls[:first] for name in call.outputs]
        out.append(tuple(name for name in made if name in read and name not in repeated))
    return tuple(out)


def repeatable_values(graph: Graph, *, parameters: bool = True) -> Mapping[str, tuple[BlockSlice, ...]]:
    """Values between calls that every chunk can compute for itself, and the nodes of each call that compute them, in order.

    They carry no gradient, and inputs of the batch, constant buffers and (with `parameters`) frozen parameters determine them
    without random numbers; their sizes too. Where all parameters are frozen, none is repeated: each chunk would be all those
    before it.
    """
    repeats_frozen = parameters and not graph.forward_only
    blocks = {block.name: block for block in graph.blocks}
    values = {block.name: block.values() for block in graph.blocks}
    written = written_buffers(graph)
    makers = {name: (index, slot) for index, call in enumerate(graph.calls) for slot, name in enumerate(call.outputs)}
    found: dict[str, dict[int, set[str]] | None] = {}

    def needs(name: str) -> dict[int, set[str]] | None:
        """The nodes of each call that compute a value; None where it is not repeatable."""
        if name not in makers:  # an input of the batch, or a total over its micro-batches: every rank has them
            return {}
        if name not in found:
            found[name] = None
            found[name] = _needs(name)
        return found[name]

    def _needs(name: str) -> dict[int, set[str]] | None:
        index, slot = makers[name]
        call = graph.calls[index]
        block = blocks[call.block]
        inner = block.outputs[slot]
        if values[call.block][inner].differentiable:
            return None
        nodes = ancestors(block.nodes, {inner})
        if not nodes or any(map(draws_masks, nodes)):  # handed on: it is another value
            return None
        out = {index: {node.name for node in nodes}}
        read = {inner, *(operand for node in nodes for operand in node.operands())}
        if lacks_batch(nodes, [value for value in block.inputs if value.name in read]):
            read |= {value.name for value in batch_input(block.inputs)}  # as `extract_block` does
        for parameter, original in zip(block.parameters, call.parameters, strict=True):
            constant = parameter.buffer or (repeats_frozen and not parameter.trainable)
            if parameter.value.name in read and (original in written or not constant):
                return None
        for value, source in zip(block.inputs, call.inputs, strict=True):
            if value.name in read:
                before = needs(source)
                if before is None:
                    return None
                for number, names in before.items():
                    out.setdefault(number, set()).update(names)
        return out

    return {name: _merged(graph, [made]) for name in makers if (made := needs(name)) is not None}


def _merged(graph: Graph, needed: Sequence[Mapping[int, set[str]]]) -> tuple[BlockSlice, ...]:
    """The union of several sets of nodes per call, each node once, in order."""
    union: dict[int, set[str]] = {}
    for need in needed:
        for index, names in need.items():
            union.setdefault(index, set()).update(names)
    out = []
    for index in sorted(union):
        block = graph.block(graph.calls[index].block)
        out.append(BlockSlice(index, tuple(node.name for node in block.nodes if node.name in union[index])))
    return tuple(out)


def values_with_gradients(graph: Graph) -> frozenset[str]:
    """The values between calls into which the loss sends a gradient.

    A value that is differentiable where it is made is none of them where all that reads it detaches it, or does not reach the
    loss: its gradient is None, which is not zeros (Adam moves a parameter whose gradient is zeros).
    """
    blocks = {block.name: (block, block.values()) for block in graph.blocks}
    reached = {graph.loss}
    for call in reversed(graph.calls):
        block, values = blocks[call.block]
        inner = {name for name, outer in zip(block.outputs, call.outputs, strict=True) if outer in reached}
        for node in reversed(block.nodes):
            if any(value.differentiable and value.name in inner for value in node.outputs):
                inner.update(name for name in node.operands() if values[name].differentiable)
        reached.update(outer for value, outer in zip(block.inputs, call.inputs, strict=True) if value.name in inner)
    return frozenset(reached)


def joined_slices(graph: Graph, several: Sequence[Sequence[BlockSlice]]) -> tuple[BlockSlice, ...]:
    """The slices that compute several values, each node once."""
    return _merged(graph, [{part.call: set(part.nodes)} for each in several for part in each])


def written_buffers(graph: Graph) -> dict[str, str]:
    """The buffers that the forward writes, by original name, with the module path of the call that writes them."""
    out: dict[str, str] = {}
    writers = {block.name: block for block in graph.blocks if block.updates}
    for call in graph.calls:
        if (block := writers.get(call.block)) is not None:
            targets = {target for target, _ in block.updates}
            pairs = zip(block.parameters, call.parameters, strict=True)
            out.update((name, call.prefix or call.block) for parameter, name in pairs if parameter.value.name in targets)
    return out


def check_chunk_borders(graph: Graph, chunks: Sequence[Sequence[int]]) -> None:
    """PlanError, with module paths, where chunks share more than values: a buffer that one writes and another reads; or where the
    loss is not computed in the last chunk."""
    place = {index: number for number, chunk in enumerate(chunks) for index in chunk}
    written = written_buffers(graph)
    where: dict[str, tuple[int, str]] = {}
    for index, call in enumerate(graph.calls):
        for name in call.parameters:
            if name in written:
                number, path = where.setdefault(name, (place[index], call.prefix or call.block))
                if number != place[index]:
                    raise PlanError(
                        f"the buffer {name} is written by {written[name]} and used by both {path} (chunk {number}) and "
                        f"{call.prefix or call.block} (chunk {place[index]}): cut elsewhere, or take fewer stages"
                    )
    maker = next((index for index, call in enumerate(graph.calls) if graph.loss in call.outputs), None)
    if maker is None or place[maker] != len(chunks) - 1:
        raise PlanError(f"the loss of {graph.name} is not computed in the last chunk of the pipeline: take fewer stages")
