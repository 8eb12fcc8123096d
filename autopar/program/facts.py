"""What the program's class says beside its calls: mesh, inputs, precision, and what the loss needs of the whole batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.placement import Shard, parse_placement
from autopar.passes.lowered import Lowered
from autopar.program.block_source import INDENT
from autopar.program.calls_source import CallsWriter

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Totals:
    """`names` are what ``count`` gives, further arguments of the forward; `ops` how each is reduced over the micro-batches."""

    names: tuple[str, ...]
    ops: tuple[str, ...]
    body: tuple[str, ...]

    def method(self, lowered: Lowered) -> list[str]:
        """``def count``, where there is something to count."""
        if not self.names:
            return []
        arguments = "".join(f", {value.name}" for value in lowered.inputs)
        made = ", ".join(f'"{name}": {name}' for name in self.names)
        lines = [*self.body, f"return {{{made}}}"]
        return [f"{INDENT}def count(self{arguments}):", *(f"{INDENT * 2}{line}" for line in lines), ""]


def totals_of(lowered: Lowered, names: dict[str, str], writer: CallsWriter) -> Totals:
    """Writes the calls of the totals first: their blocks are made in ``__init__``, their results get names."""
    for call in lowered.totals:
        writer.alone(call)
    body = tuple(writer.body)
    writer.body.clear()
    return Totals(tuple(names[name] for call in lowered.totals for name in call.outputs), lowered.total_ops, body)


def facts(lowered: Lowered, totals: Totals) -> list[str]:
    """The attributes of the class."""
    mesh = ", ".join(f'"{name}": {size}' for name, size in lowered.axes)
    inputs = [
        f'{INDENT * 2}"{name}": {{{", ".join(f"{axis!r}: {where!r}" for axis, where in texts)}}},'.replace("'", '"')
        for name, texts in lowered.input_placements
    ]
    shapes = ", ".join(
        f'"{value.name}": {tuple(None if isinstance(n, str) or dim in cut else n for dim, n in enumerate(value.shape))}'
        for value, cut in zip(lowered.inputs, map(_cut, lowered.input_placements), strict=True)
    )
    dtypes = ", ".join(f'"{value.name}": "{value.dtype}"' for value in lowered.inputs)
    grouped = 0 < lowered.zero_group < lowered.mesh.size_of("dp")
    ops = ", ".join(f'"{name}": "{op}"' for name, op in zip(totals.names, totals.ops, strict=True))
    return [
        f"{INDENT}mesh_axes = {{{mesh}}}",
        *([f"{INDENT}input_placements = {{", *inputs, f"{INDENT}}}"] if inputs else []),
        *([f"{INDENT}input_shapes = {{{shapes}}}  # None: any batch"] if shapes else []),
        *([f"{INDENT}input_dtypes = {{{dtypes}}}"] if dtypes else []),
        *_called(lowered),
        *_outputs(lowered),
        f'{INDENT}precision = ("{lowered.precision.compute}", "{lowered.precision.master}")  # compute, stored',
        *([f"{INDENT}micro_batches = {lowered.micro_batches}"] if lowered.micro_batches > 1 else []),
        *([f"{INDENT}zero_group = {lowered.zero_group}  # neighbours that share one copy of the state"] if grouped else []),
        *([f"{INDENT}totals = {{{ops}}}  # over all micro-batches, before the first"] if totals.names else []),
    ]


def returned(names: Iterable[str]) -> str:
    """The loss, and what is returned beside it: only the loss takes gradients."""
    loss, *others = names
    return ", ".join((loss, *(f"{name}.detach()" for name in others)))


def _outputs(lowered: Lowered) -> list[str]:
    if not lowered.outputs:
        return []
    texts = [
        f"{_key(each.path)}: {{{', '.join(f'{_key(a)}: {_key(at)}' for a, at in each.placements)}}}" for each in lowered.outputs
    ]
    return [f"{INDENT}outputs = {{  # returned behind the loss", *(f"{INDENT * 2}{text}," for text in texts), f"{INDENT}}}"]


def _called(lowered: Lowered) -> list[str]:
    """How the user passes the inputs, and the constants that go with them."""
    interface = lowered.interface
    if interface is None:
        return []
    nested = {each.path: each.input for each in interface.arguments if each.input and each.path != each.input}
    fixed = {each.path: each.constant for each in interface.arguments if not each.input and not each.optional}
    usual = {each.path: each.constant for each in interface.arguments if not each.input and each.optional}
    told = f"{INDENT}positional = ({''.join(f'{_key(name)}, ' for name in interface.positional).rstrip()})"
    return [
        told,
        *_table("arguments", nested, "paths in the user's arguments"),
        *_table("constants", fixed, "as they were captured"),
        *_table("defaults", usual, "may be left out"),
    ]


def _table(name: str, texts: Mapping[str, str], comment: str) -> list[str]:
    """A dictionary of texts in lines of readable length."""
    if not texts:
        return []
    lines, current = [], ""
    for key, text in texts.items():
        item = f"{_key(key)}: {_key(text)}, "
        if current and len(current) + len(item) > WIDTH:
            lines.append(current.rstrip())
            current = ""
        current += item
    lines.append(current.rstrip())
    if len(lines) == 1:
        return [f"{INDENT}{name} = {{{lines[0].rstrip(',')}}}  # {comment}"]
    return [f"{INDENT}{name} = {{  # {comment}", *(f"{INDENT * 2}{line}" for line in lines), f"{INDENT}}}"]


def _key(text: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _cut(placed: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[int, ...]:
    """The dimensions of an input that the data axis cuts."""
    places = (parse_placement(text) for _, text in placed[1])
    return tuple(place.dim for place in places if isinstance(place, Shard))
