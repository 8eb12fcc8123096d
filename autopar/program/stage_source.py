"""The text of a pipeline: one class per model chunk, and the program with boundary tensors and the schedule's actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir import dims
from autopar.ir.graph import Value
from autopar.ir.schedule import Schedule
from autopar.passes.lowered import Lowered, LoweredChunk
from autopar.passes.readable_names import RESERVED
from autopar.program.block_source import INDENT, batch_size_source
from autopar.program.calls_source import CallsWriter, fresh_variable
from autopar.program.checks import comment, docstring, quoted, size_source
from autopar.program.program_attributes import batch_method, program_attributes, return_values, write_totals

WIDTH = 110


def pipeline_classes(lowered: Lowered, schedule: Schedule) -> list[list[str]]:
    """The lines of the classes of the model chunks, then of the program."""
    known = {value.name: value.name for value in lowered.inputs}
    writer = CallsWriter(lowered, (), (), known)
    totals = write_totals(lowered, known, writer)
    taken = {*RESERVED, *known.values()}
    received = dict.fromkeys(value.name for chunk in lowered.chunks for value in chunk.receives)
    between = {name: fresh_variable(name, taken) for name in received}
    chunks = [_chunk_class(lowered, number, chunk, known, between, schedule) for number, chunk in enumerate(lowered.chunks)]
    arguments = "".join(f", {value.name}" for value in lowered.inputs)
    stale = f"{INDENT}weight_versions = 2  # gradients are those of the weights before the last update"
    versions = [stale] if lowered.candidate.pipeline.weight_versions > 1 else []
    batch_size = batch_size_source((value.name, value.shape) for value in lowered.inputs)
    program = [
        "class Program(Base):",
        f'{INDENT}"""The whole step of one rank: its model chunks on its batch, in the order of the schedule."""',
        "",
        *program_attributes(lowered, totals),
        f"{INDENT}chunks = ({', '.join(f'Chunk{number}' for number in range(len(chunks)))})",
        f"{INDENT}boundaries = (  # sent from each chunk to the next",
        *(line for chunk in lowered.chunks[1:] for line in _boundary_tuple(list(_boundary_tensors(chunk.receives, between)))),
        f"{INDENT})",
        f"{INDENT}schedule = (  # actions of each stage: {comment(schedule.name)}",
        *(line for rank in schedule.ranks for line in _schedule_lines([str(action) for action in rank])),
        f"{INDENT})",
        *versions,
        f"{INDENT}loss_dtype = {quoted(lowered.chunks[-1].sends[0].dtype)}",
        "",
        *writer.init_method(),
        *batch_method(lowered.graph.interface),
        *totals.method(lowered),
        f"{INDENT}def micro_batch_size(self{arguments}):",
        f'{INDENT * 2}"""B, of one micro-batch."""',
        f"{INDENT * 2}return {batch_size or f'{lowered.batch}  # of the plan: no input has it'}",
    ]
    return [*chunks, program]


def _boundary_tuple(texts: Sequence[str]) -> list[str]:
    """A tuple of boundary tensors, in one line or in one line each."""
    if len(texts) < 2:
        return [f"{INDENT * 2}({''.join(texts)}),"]
    return [f"{INDENT * 2}(", *(f"{INDENT * 3}{text}" for text in texts), f"{INDENT * 2}),"]


def _boundary_tensors(values: Sequence[Value], names: dict[str, str]) -> Iterator[str]:
    for value in values:
        shape = ", ".join(size_source(dim) for dim in value.shape)
        shape += "," if len(value.shape) == 1 else ""
        batch = "B" if any(map(dims.has_batch, value.shape)) else "_"
        gradient = "" if value.differentiable else ", gradient=False"
        yield f"BoundaryTensor({quoted(names[value.name])}, lambda {batch}: ({shape}), {quoted(value.dtype)}{gradient}),"


def _schedule_lines(words: Sequence[str]) -> Iterator[str]:
    """All words as one string literal, in lines of at most `WIDTH`."""
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


def _chunk_class(
    lowered: Lowered, number: int, chunk: LoweredChunk, known: dict[str, str], between: dict[str, str], schedule: Schedule
) -> list[str]:
    received = [value.name for value in chunk.receives]
    read = {name for call in chunk.calls for name in call.inputs} - set(received)
    produced = {name for call in chunk.calls for name in call.outputs}
    batch_inputs = [name for name in known if name in read and name not in produced]
    names = {name: between[name] for name in received} | {name: known[name] for name in batch_inputs}
    results = [value.name for value in chunk.sends]
    writer = CallsWriter(lowered, chunk.calls, results, names)
    writer.write()
    final, returned = number + 1 == len(lowered.chunks), [names[name] for name in results]
    arguments = "".join(f", {names[name]}" for name in (*received, *batch_inputs))
    taken = "".join(f"{quoted(known[name])}, " for name in batch_inputs)
    prefixes = list(dict.fromkeys(call.prefix or call.block for call in chunk.calls))
    where = ", ".join(prefixes) if len(prefixes) < 4 else f"{prefixes[0]}, {prefixes[1]} .. {prefixes[-1]}"
    return [
        f"class Chunk{number}(ModelChunk):",
        f'{INDENT}"""On stage {schedule.rank_of[number]}: {docstring(where)}"""',
        "",
        f"{INDENT}batch_inputs = ({taken.strip() if len(batch_inputs) == 1 else taken.rstrip(', ')})",
        "",
        *writer.init_method(),
        f"{INDENT}def forward(self{arguments}):",
        *(f"{INDENT * 2}{line}" for line in writer.forward_lines),
        f"{INDENT * 2}return {return_values(returned, lowered.outputs) if final else ', '.join(returned)}",
    ]
