"""The classes of a pipeline as text: one for each chunk, and the program with what goes between them and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir import dims
from autopar.ir.graph import Value
from autopar.ir.schedule import Schedule
from autopar.passes.lowered import Lowered, LoweredChunk
from autopar.passes.readable_names import RESERVED
from autopar.program.block_source import INDENT, batch_source
from autopar.program.calls_source import CallsWriter, variable
from autopar.program.facts import facts, returned, totals_of

WIDTH = 110


def pipeline_classes(lowered: Lowered, schedule: Schedule) -> list[list[str]]:
    """The chunks' classes and then the program's."""
    known = {value.name: value.name for value in lowered.inputs}
    writer = CallsWriter(lowered, (), (), known)
    totals = totals_of(lowered, known, writer)
    taken = {*RESERVED, *known.values()}
    sent = dict.fromkeys(value.name for chunk in lowered.chunks for value in chunk.receives)
    between = {name: variable(name, taken) for name in sent}
    chunks = [_chunk(lowered, number, chunk, known, between, schedule) for number, chunk in enumerate(lowered.chunks)]
    arguments = "".join(f", {value.name}" for value in lowered.inputs)
    stale = f"{INDENT}weight_versions = 2  # gradients are those of the weights before the last update"
    versions = [stale] if lowered.weight_versions > 1 else []
    program = [
        "class Program(Base):",
        f'{INDENT}"""The whole step of one rank: its batch through its chunks, in the order of the schedule."""',
        "",
        *facts(lowered, totals),
        f"{INDENT}chunks = ({', '.join(f'Chunk{number}' for number in range(len(chunks)))})",
        f"{INDENT}boundaries = (  # from each chunk to the next",
        *(line for chunk in lowered.chunks[1:] for line in _boundary(list(_boundaries(chunk.receives, between)))),
        f"{INDENT})",
        f"{INDENT}schedule = (  # of each stage: {schedule.name}",
        *(line for rank in schedule.ranks for line in _text([str(action) for action in rank])),
        f"{INDENT})",
        *versions,
        f'{INDENT}loss_dtype = "{lowered.chunks[-1].sends[0].dtype}"',
        "",
        *_init(writer.made),
        *totals.method(lowered),
        f"{INDENT}def examples(self{arguments}):",
        f'{INDENT * 2}"""B, of one micro-batch."""',
        f"{INDENT * 2}return {_examples(lowered)}",
    ]
    return [*chunks, program]


def _init(made: Sequence[str]) -> list[str]:
    if not made:
        return []
    return [
        f"{INDENT}def __init__(self, mesh):",
        f"{INDENT * 2}super().__init__(mesh)",
        *(f"{INDENT * 2}{line}" for line in made),
        "",
    ]


def _examples(lowered: Lowered) -> str:
    read = batch_source((value.name, value.shape) for value in lowered.inputs)
    return read or f"{lowered.batch}  # of the plan: no input tells"


def _boundary(texts: Sequence[str]) -> list[str]:
    """A tuple in one line, or a line for each of several."""
    if len(texts) < 2:
        return [f"{INDENT * 2}({''.join(texts)}),"]
    return [f"{INDENT * 2}(", *(f"{INDENT * 3}{text}" for text in texts), f"{INDENT * 2}),"]


def _boundaries(values: Sequence[Value], names: dict[str, str]) -> Iterator[str]:
    for value in values:
        shape = ", ".join(dim.replace("/", "//") if isinstance(dim, str) else str(dim) for dim in value.shape)
        shape += "," if len(value.shape) == 1 else ""
        batch = "B" if any(map(dims.has_batch, value.shape)) else "_"
        gradient = "" if value.differentiable else ", gradient=False"
        yield f'Boundary("{names[value.name]}", lambda {batch}: ({shape}), "{value.dtype}"{gradient}),'


def _text(words: Sequence[str]) -> Iterator[str]:
    """One string of all words, in lines."""
    lines, current = [], ""
    for word in words:
        if len(current) + len(word) > WIDTH:
            lines.append(current)
            current = ""
        current += f"{word} "
    lines.append(current.rstrip())
    for number, line in enumerate(lines):
        yield f'{INDENT * 2}{"" if len(lines) == 1 else "(" if number == 0 else " "}"{line}"' + (
            "," if len(lines) == 1 else ")," if number == len(lines) - 1 else ""
        )


def _chunk(
    lowered: Lowered, number: int, chunk: LoweredChunk, known: dict[str, str], between: dict[str, str], schedule: Schedule
) -> list[str]:
    received = [value.name for value in chunk.receives]
    read = {name for call in chunk.calls for name in call.inputs} - set(received)
    made = {name for call in chunk.calls for name in call.outputs}
    takes = [name for name in known if name in read and name not in made]
    names = {name: between[name] for name in received} | {name: known[name] for name in takes}
    results = [value.name for value in chunk.sends]
    writer = CallsWriter(lowered, chunk.calls, results, names)
    writer.write()
    last = returned if number + 1 == len(lowered.chunks) else ", ".join
    arguments = "".join(f", {names[name]}" for name in (*received, *takes))
    taken = "".join(f'"{known[name]}", ' for name in takes)
    prefixes = list(dict.fromkeys(call.prefix or call.block for call in chunk.calls))
    where = ", ".join(prefixes) if len(prefixes) < 4 else f"{prefixes[0]}, {prefixes[1]} .. {prefixes[-1]}"
    return [
        f"class Chunk{number}(Chunk):",
        f'{INDENT}"""On stage {schedule.rank_of[number]}: {where}"""',
        "",
        f"{INDENT}takes = ({taken.strip() if len(takes) == 1 else taken.rstrip(', ')})",
        "",
        *_init(writer.made),
        f"{INDENT}def forward(self{arguments}):",
        *(f"{INDENT * 2}{line}" for line in writer.body),
        f"{INDENT * 2}return {last(names[name] for name in results)}",
    ]
