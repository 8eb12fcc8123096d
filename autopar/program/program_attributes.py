"""The class attributes of a program: mesh, inputs, outputs, precision, and totals over the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.interface import Interface
from autopar.ir.placement import Shard, parse_placement
from autopar.passes.lowered import Lowered, LoweredOutput
from autopar.program.block_source import INDENT
from autopar.program.calls_source import CallsWriter
from autopar.program.checks import quoted

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
    return Totals(tuple(names[name] for call in lowered.total_calls for name in call.outputs), lowered.total_ops, body)


def program_attributes(lowered: Lowered, totals: Totals) -> list[str]:
    """The lines of the class attributes."""
    mesh = ", ".join(f"{quoted(name)}: {size}" for name, size in lowered.axes)
    inputs = [
        f"{INDENT * 2}{quoted(name)}: {{{', '.join(f'{quoted(axis)}: {quoted(where)}' for axis, where in texts)}}},"
        for name, texts in lowered.input_placements
    ]
    shapes = ", ".join(
        f"{quoted(value.name)}: {tuple(None if isinstance(n, str) or dim in sharded else n for dim, n in enumerate(value.shape))}"
        for value, sharded in zip(lowered.inputs, map(_data_sharded_dims, lowered.input_placements), strict=True)
    )
    dtypes = ", ".join(f"{quoted(value.name)}: {quoted(value.dtype)}" for value in lowered.inputs)
    flowing = "".join(f"{quoted(value.name)}, " for value in lowered.inputs if value.differentiable).rstrip()
    grouped = 0 < lowered.zero_group < lowered.mesh.size_of("dp")
    ops = ", ".join(f"{quoted(name)}: {quoted(op)}" for name, op in zip(totals.names, totals.ops, strict=True))
    offload, reduce = lowered.precision.offload_optimizer, lowered.precision.reduce
    return [
        f"{INDENT}mesh_axes = {{{mesh}}}",
        *([f"{INDENT}input_placements = {{", *inputs, f"{INDENT}}}"] if inputs else []),
        *([f"{INDENT}input_shapes = {{{shapes}}}  # None: any batch"] if shapes else []),
        *([f"{INDENT}input_dtypes = {{{dtypes}}}"] if dtypes else []),
        *([f"{INDENT}differentiable_inputs = ({flowing})  # gradients flow into them"] if flowing else []),
        *_interface_lines(lowered),
        *_output_lines(lowered),
        f"{INDENT}precision = ({quoted(lowered.precision.compute)}, {quoted(lowered.precision.master)})  # compute, stored",
        *([f"{INDENT}reduce_dtype = {quoted(reduce)}  # in which gradients are summed over the data axis"] if reduce else []),
        *([f"{INDENT}micro_batches = {lowered.micro_batches}"] if lowered.micro_batches > 1 else []),
        *(
            [f"{INDENT}zero_group = {lowered.zero_group}  # neighbouring data ranks that shard one copy of the state"]
            if grouped
            else []
        ),
        *([f"{INDENT}offload_optimizer = {quoted(offload)}  # between steps its state lies there"] if offload else []),
        *([f"{INDENT}forward_only = True  # nothing trains: no backward runs"] if lowered.forward_only else []),
        *([f"{INDENT}totals = {{{ops}}}  # over all micro-batches, before the first"] if totals.names else []),
    ]


def return_values(names: Iterable[str], outputs: Iterable[LoweredOutput]) -> str:
    """The loss, and the outputs beside it: those that take no gradients without their graph."""
    loss, *others = names
    given = (name if each.kind == "gradient" else f"{name}.detach()" for name, each in zip(others, outputs, strict=True))
    return ", ".join((loss, *given))


def _output_lines(lowered: Lowered) -> list[str]:
    stand_in = lowered.interface is not None and not lowered.interface.has_loss
    has_loss = [f"{INDENT}has_loss = False  # the loss is a stand-in, which nobody gets"] * stand_in
    if not lowered.outputs:
        return has_loss
    texts = [
        f"{quoted(each.path)}: {{{', '.join(f'{quoted(a)}: {quoted(at)}' for a, at in each.placements)}}}"
        for each in lowered.outputs
    ]
    kinds = {each.path: each.kind for each in lowered.outputs}
    returned = [f"{INDENT}outputs = {{  # returned after the loss", *(f"{INDENT * 2}{text}," for text in texts), f"{INDENT}}}"]
    return [*returned, *_dict_lines("output_kinds", kinds, "how they come back"), *has_loss]


def _interface_lines(lowered: Lowered) -> list[str]:
    """How the user passes the inputs, and the constant arguments."""
    interface = lowered.interface
    if interface is None:
        return []
    nested = {each.path: each.input for each in interface.arguments if each.input and each.path != each.input}
    fixed = {each.path: each.constant for each in interface.arguments if not each.input and not each.optional}
    usual = {each.path: each.constant for each in interface.arguments if not each.input and each.optional}
    positional = f"{INDENT}positional = ({''.join(f'{quoted(name)}, ' for name in interface.positional).rstrip()})"
    return [
        positional,
        *_dict_lines("arguments", nested, "paths in the user's arguments"),
        *_dict_lines("constants", fixed, "as captured"),
        *_dict_lines("defaults", usual, "optional arguments"),
        *_batch_dim_lines(interface),
    ]


def _batch_dim_lines(interface: Interface) -> list[str]:
    items = ", ".join(f"{quoted(name)}: {dim}" for name, dim in interface.batch_dims.items())
    return [f"{INDENT}batch_dims = {{{items}}}  # where the caller's tensors have the batch"] if items else []


def _dict_lines(name: str, texts: Mapping[str, str], comment: str) -> list[str]:
    """A dictionary of strings, in lines of at most `WIDTH`."""
    if not texts:
        return []
    lines, current = [], ""
    for key, text in texts.items():
        item = f"{quoted(key)}: {quoted(text)}, "
        if current and len(current) + len(item) > WIDTH:
            lines.append(current.rstrip())
            current = ""
        current += item
    lines.append(current.rstrip())
    if len(lines) == 1:
        return [f"{INDENT}{name} = {{{lines[0].rstrip(',')}}}  # {comment}"]
    return [f"{INDENT}{name} = {{  # {comment}", *(f"{INDENT * 2}{line}" for line in lines), f"{INDENT}}}"]


def _data_sharded_dims(placed: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[int, ...]:
    """The dimensions of an input that the data axis shards."""
    places = (parse_placement(text) for _, text in placed[1])
    return tuple(place.dim for place in places if isinstance(place, Shard))
