"""Splits one block into several, so that the border between two pipeline stages may lie inside of it.

Before: ``y = Main(x)`` of nodes 0 .. 9; after, split at 4: ``main_relu = Main_1(x); y = Main_2(main_relu)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Block, Call, Graph, batch_input, lacks_batch


def live_values(block: Block) -> tuple[tuple[str, ...], ...]:
    """Return for each place between nodes (before node 1, 2, ...), the values that are live: produced before it, and read after
    it or results of the block. The part that makes what is written into a buffer writes it, so that this is live as long as the
    buffer is read: what reads it later would read the new value."""
    last: dict[str, int] = {}
    for index, node in enumerate(block.nodes):
        last.update(dict.fromkeys(node.operands(), index))
    last.update({value: max(last.get(value, -1), last.get(buffer, -1)) for buffer, value in block.updates})
    last.update(dict.fromkeys(block.outputs, len(block.nodes)))
    made: list[str] = []
    out = []
    for index, node in enumerate(block.nodes[:-1], 1):
        made += [value.name for value in node.outputs]
        made = [name for name in made if last.get(name, -1) >= index]
        out.append(tuple(made))
    return tuple(out)


def single_tensor_cuts(block: Block) -> tuple[int, ...]:
    """The places (indices of the node after them) at which exactly one value is live, and it has a gradient."""
    values = block.values()
    found = enumerate(live_values(block), 1)
    return tuple(place for place, names in found if len(names) == 1 and values[names[0]].differentiable)


def split_block(graph: Graph, name: str, places: Sequence[int]) -> Graph:
    """`graph` with the block `name`, and all calls of it, split before the nodes at `places`. PlanError for a wrong place."""
    block = graph.block(name)
    edges = [0, *places, len(block.nodes)]
    if any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
        raise PlanError(
            f"{name} of {len(block.nodes)} operations cannot be split at {tuple(places)}: give increasing places inside"
        )
    parts = _parts(block, edges, {each.name for each in graph.blocks})
    taken = {value.name for value in graph.inputs} | {value for call in graph.calls for value in call.outputs}
    calls: list[Call] = []
    for call in graph.calls:
        calls += _calls(call, block, parts, taken) if call.block == name else [call]
    blocks = [part for each in graph.blocks for part in (parts if each.name == name else (each,))]
    return replace(graph, blocks=tuple(blocks), calls=tuple(calls))


def split_like(graph: Graph, other: Graph) -> Graph:
    """`graph` with those of its blocks split that are split in `other`, which makes the same operations in the same order, at the
    same places. A graph that is not so related is split as far as it goes."""
    sizes = [len(other.block(call.block).nodes) for call in other.calls]
    places: dict[str, list[int]] = {}
    for call in graph.calls:  # by calls: parts of different blocks may be equal, as the activations of a frozen layer and another
        ends, size = [0], len(graph.block(call.block).nodes)
        while sizes and ends[-1] < size:
            ends.append(ends[-1] + sizes.pop(0))
        if len(ends) > 2 and ends[-1] == size:
            places.setdefault(call.block, ends[1:-1])
    for name, inside in places.items():
        graph = split_block(graph, name, inside)
    return graph


def _parts(block: Block, edges: Sequence[int], taken: set[str]) -> tuple[Block, ...]:
    values = block.values()
    parameters = {parameter.value.name: parameter for parameter in block.parameters}
    made_in = {value.name: number for number, (a, b) in enumerate(zip(edges, edges[1:], strict=False))
               for node in block.nodes[a:b] for value in node.outputs}  # fmt: skip
    last = len(edges) - 2
    out = []
    for number, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        nodes = block.nodes[start:end]
        updates = tuple((target, value) for target, value in block.updates if made_in.get(value, last) == number)
        read = list(dict.fromkeys(operand for node in nodes for operand in node.operands()))
        read += [name for pair in updates for name in pair if name not in read]
        if number == last:  # inputs of the block that are also its results go through the last part
            read += [name for name in block.outputs if name not in made_in and name not in read]
        inputs = [value for value in block.inputs if value.name in read]
        inputs += [values[name] for name in read if made_in.get(name, number) < number]
        if lacks_batch(nodes, inputs):
            inputs += batch_input(block.inputs)
        read_after = {operand for node in block.nodes[end:] for operand in node.operands()}
        made = [value.name for node in nodes for value in node.outputs]
        ends = [name for name in made if name in read_after or name in block.outputs]
        ends += [name for name in block.outputs if number == last and name not in made_in and name not in ends]
        name = f"{block.name}_{number + 1}"
        while name in taken:
            name += "_"
        out.append(
            Block(
                name=name,
                inputs=tuple(inputs),
                parameters=tuple(p for key, p in parameters.items() if key in read),
                nodes=nodes,
                outputs=tuple(ends),
                updates=updates,
            )
        )
    return tuple(out)


def _calls(call: Call, block: Block, parts: Sequence[Block], taken: set[str]) -> list[Call]:
    """The calls of the parts in place of `call`; the values between the parts get new names."""
    known = {value.name: name for value, name in zip(block.inputs, call.inputs, strict=True)}
    originals = {p.value.name: name for p, name in zip(block.parameters, call.parameters, strict=True)}
    results = dict(zip(block.outputs, call.outputs, strict=True))
    stem = call.prefix.replace(".", "_") or block.name.lower()
    out = []
    for part in parts:
        inputs = tuple(known[value.name] for value in part.inputs)
        names = []
        for inner in part.outputs:
            name = results.get(inner) or f"{stem}_{inner}"
            while inner not in results and name in taken:
                name += "_"
            taken.add(name)
            if inner not in known or inner in results:
                known[inner] = name
            names.append(name)
        out.append(Call(part.name, call.prefix, inputs, tuple(names), tuple(originals[p.value.name] for p in part.parameters)))
    return out
