"""The class attributes of a program: mesh, inputs, outputs, precision, and totals over the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.dims import BATCH
from autopar.ir.interface import Interface
from autopar.ir.placement import Shard, parse_placement
from autopar.passes.lowered import Lowered, LoweredOutput
from autopar.program.block_source import INDENT
from autopar.program.calls_source import CallsWriter
from autopar.program.checks import quoted, size_source
from autopar.program.expressions import WHOLE_BATCH

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over the whole batch: `names` are the results of ``count`` and further arguments of the forward, `ops` reduce them
    over the micro-batches, `body` are the lines of ``count``."""

    names: tuple[str, ...]
    ops: tuple[str, ...]
    body: tuple[str, ...]

    def method(self, lowered: Lowered) -> list[str]:
        """``def count``, where there are totals."""
        if not self.names:
            return []
        arguments = "".join(f", {value.name}" for value in lowered.inputs)
        items = ", ".join(f"{quoted(name)}: {name}" for name in self.names)
        lines = [*self.body, f"return {{{items}}}"]
        return [f"{INDENT}def count(self{arguments}):", *(f"{INDENT * 2}{line}" for line in lines), ""]


def write_totals(lowered: Lowered, names: dict[str, str], writer: CallsWriter) -> Totals:
    """Writes the calls of the totals, before all others, with `writer`."""
    for call in lowered.total_calls:
        writer.write_call(call)
    body = tuple(writer.forward_lines)
    writer.forward_lines.clear()
    return Totals(tuple(names[name] for name in lowered.totals), tuple(lowered.totals.values()), body)


def program_attributes(lowered: Lowered, totals: Totals) -> list[str]:
    """The lines of the class attributes; those with an empty text are left out."""
    graph, candidate, inputs = lowered.graph, lowered.candidate, lowered.inputs
    precision, offload = candidate.precision, candidate.precision.offload_optimizer
    shapes = (
        repr(tuple(None if isinstance(n, str) or dim in sharded else n for dim, n in enumerate(value.shape)))
        for value, sharded in zip(inputs, map(_data_sharded_dims, lowered.input_placements), strict=True)
    )
    names = [value.name for value in inputs]
    rows = (
        ("mesh_axes", _dict((name, str(size)) for name, size in lowered.axes), ""),
        ("input_placements", _block((name, _placements(at)) for name, at in lowered.input_placements), ""),
        ("input_shapes", _dict(zip(names, shapes, strict=True)), "None: any batch"),
        ("input_dtypes", _dict((value.name, quoted(value.dtype)) for value in inputs), ""),
        ("differentiable_inputs", _tuple(v.name for v in inputs if v.differentiable), "gradients flow into them"),
        *_interface_rows(graph.interface),
        ("outputs", _block(((o.path, _placements(o.placements)) for o in lowered.outputs), "returned after the loss"), ""),
        ("output_kinds", *_wrapped({each.path: each.kind for each in lowered.outputs}, "how they come back")),
        ("has_loss", "False" * (not graph.has_loss), "the loss is a stand-in, which nobody gets"),
        ("precision", f"({quoted(precision.compute)}, {quoted(precision.master)})", "compute, stored"),
        ("reduce_dtype", precision.reduce and quoted(precision.reduce), "in which gradients are summed over the data axis"),
        ("micro_batches", str(candidate.micro_batches) * (candidate.micro_batches > 1), ""),
        (
            "zero_group",
            str(candidate.zero_group) * (0 < candidate.zero_group < candidate.mesh.size_of("dp")),
            "neighbouring data ranks that shard one copy of the state",
        ),
        ("offload_optimizer", offload and quoted(offload), "between steps its state lies there"),
        ("forward_only", "True" * graph.forward_only, "nothing trains: no backward runs"),
        ("totals", _dict(zip(totals.names, map(quoted, totals.ops), strict=True)), "over all micro-batches, before the first"),
    )
    return [f"{INDENT}{name} = {text}{f'  # {comment}' if comment else ''}" for name, text, comment in rows if text]


def batch_method(interface: Interface | None) -> list[str]:
    """``def takes_batch``, where the forward has branches on the size of the batch."""
    if interface is None or not interface.batch_conditions:
        return []
    sizes = (size_source(each.size).replace(BATCH, WHOLE_BATCH) for each in interface.batch_conditions)
    conditions = (f"{size} {each.sign} 0" for size, each in zip(sizes, interface.batch_conditions, strict=True))
    head = [f"{INDENT}@staticmethod", f"{INDENT}def takes_batch({WHOLE_BATCH}):"]
    return [*head, f"{INDENT * 2}return {' and '.join(conditions)}", ""]


def return_values(names: Iterable[str], outputs: Iterable[LoweredOutput]) -> str:
    """The loss, and the outputs beside it: those that take no gradients without their graph."""
    loss, *others = names
    given = (name if each.kind == "gradient" else f"{name}.detach()" for name, each in zip(others, outputs, strict=True))
    return ", ".join((loss, *given))


def _interface_rows(interface: Interface | None) -> list[tuple[str, str, str]]:
    """The rows that say how the user passes the inputs, and the constant arguments."""
    if interface is None:
        return []
    every = interface.arguments
    nested = {each.path: each.input for each in every if each.input not in ("", each.path)}
    return [
        ("positional", _tuple(interface.positional) or "()", ""),
        ("arguments", *_wrapped(nested, "paths in the user's arguments")),
        ("constants", *_wrapped({a.path: a.constant for a in every if not (a.input or a.optional)}, "as captured")),
        ("defaults", *_wrapped({a.path: a.constant for a in every if a.optional and not a.input}, "optional arguments")),
        (
            "batch_dims",
            _dict((name, str(dim)) for name, dim in interface.batch_dims.items()),
            "where the caller's tensors have the batch",
        ),
    ]


def _tuple(names: Iterable[str]) -> str:
    """``("a", "b",)``; empty without names."""
    text = "".join(f"{quoted(name)}, " for name in names).rstrip()
    return text and f"({text})"


def _dict(items: Iterable[tuple[str, str]]) -> str:
    """``{"x": 2}``; empty without items."""
    text = ", ".join(f"{quoted(key)}: {value}" for key, value in items)
    return text and f"{{{text}}}"


def _placements(placements: Iterable[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{quoted(axis)}: {quoted(where)}' for axis, where in placements)}}}"


def _block(items: Iterable[tuple[str, str]], comment: str = "") -> str:
    """A dictionary with a line for each item."""
    lines = [f"{INDENT * 2}{quoted(key)}: {value}," for key, value in items]
    return "\n".join([f"{{{f'  # {comment}' if comment else ''}", *lines, f"{INDENT}}}"]) if lines else ""


def _wrapped(texts: Mapping[str, str], comment: str) -> tuple[str, str]:
    """A dictionary of strings in lines of at most `WIDTH`, and its comment, which stands in the first of several lines."""
    lines = [""]
    for key, text in texts.items():
        item = f"{quoted(key)}: {quoted(text)}, "
        if lines[-1] and len(lines[-1]) + len(item) > WIDTH:
            lines.append("")
        lines[-1] += item
    if len(lines) == 1:
        return (f"{{{lines[0].rstrip(', ')}}}" if texts else ""), comment
    return "\n".join([f"{{  # {comment}", *(f"{INDENT * 2}{line.rstrip()}" for line in lines), f"{INDENT}}}"]), ""


def _data_sharded_dims(placed: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[int, ...]:
    """The dimensions of an input that the data axis shards."""
    places = (parse_placement(text) for _, text in placed[1])
    return tuple(place.dim for place in places if isinstance(place, Shard))
