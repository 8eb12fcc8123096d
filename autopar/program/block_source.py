"""The class of one distinct block as text: its parameter specs, and its forward with one line per operation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import sympy

from autopar.ir import dims
from autopar.ir.dims import Shape
from autopar.ir.graph import Block, Node, Symbol, draws_masks, leaves
from autopar.ir.placement import parse_placement
from autopar.operations.factories import RANDOM
from autopar.operations.table import operation
from autopar.passes.lowered import Lowered, LoweredBlock, StoredParameter
from autopar.program.checks import (
    IMPORTED_NAMES,
    attribute_of,
    check_attributes,
    check_identifiers,
    class_names,
    comment,
    docstring,
    quoted,
    refuse,
)
from autopar.program.expressions import WHOLE_BATCH, expression, recomputed_expression
from autopar.rules.conversions import COLLECTIVES, axis_conversion

INDENT = "    "
COMMENT_COLUMN = 84
MAX_CODE_WIDTH = 110
RECOMPUTE = (
    f"{'with Recompute(self.mesh.host_memory) as recompute:':<{COMMENT_COLUMN - 8}}  # the backward recomputes what runs by it"
)
BATCH_SIZES = {dims.BATCH: "self.mesh.own_examples", WHOLE_BATCH: "self.mesh.all_examples"}
"""The names of the examples of one data rank, and of all, where these have uneven shards of the batch."""


def block_class_lines(lowered: Lowered, block: LoweredBlock) -> list[str]:
    """The lines of the class."""
    calls = [call for call in lowered.all_calls if call.block == block.block.name]
    prefixes = [call.prefix or "the model's own" for call in calls]
    where = prefixes[0] if len(prefixes) == 1 else f"{prefixes[0]} .. {prefixes[-1]}, {len(prefixes)} times"
    name = class_names([block.block.name])[block.block.name]
    check_identifiers([name], IMPORTED_NAMES)
    lines = [f"class {name}(BlockModule):", f'{INDENT}"""{docstring(where)}"""', "", f"{INDENT}zero = {block.zero}"]
    lines += [f"{INDENT}recompute = True"] * block.recompute
    lines += [f"{INDENT}selective_recompute = True"] * block.selective
    lines += [f"{INDENT}uses_rng = True"] * (block.recompute and any(map(draws_masks, block.block.nodes)))
    lines += [f"{INDENT}training_noise = True"] * any(node.op == RANDOM for node in block.block.nodes)
    lines += [f"{INDENT}writes_buffers = True"] * bool(block.block.updates)
    lines += _spec_lines(block.specs)
    return [*lines, "", *_Forward(lowered, block).lines()]


def _spec_lines(specs: Iterable[StoredParameter]) -> list[str]:
    written = [f"{INDENT * 2}{_spec(spec)}," for spec in specs]
    return [f"{INDENT}specs = (", *written, f"{INDENT})"] if written else [f"{INDENT}specs = ()"]


def _spec(spec: StoredParameter) -> str:
    words = [quoted(spec.path), repr(spec.shape), quoted(spec.dtype)]
    words.append("{" + ", ".join(f"{quoted(axis)}: {quoted(where)}" for axis, where in spec.placements) + "}")
    words += ["trainable=False"] * (not spec.trainable) + ["buffer=True"] * spec.buffer
    return f"ParameterSpec({', '.join(words)})"


def shape_comment(shape: Shape) -> str:
    """``B 2048 512``, or ``()`` for a scalar."""
    return " ".join(str(dim).replace("*", "") if isinstance(dim, str) else str(dim) for dim in shape) or "()"


def batch_size_source(inputs: Iterable[tuple[str, Shape]]) -> str | None:
    """The expression of ``B`` from the shape of an input: ``x.shape[0]``, ``x.shape[0] // 16`` or, where no input has a multiple
    of it, ``(x.shape[0] - 3) // 2``; None where no shape tells."""
    symbol = sympy.Symbol(dims.BATCH, integer=True, positive=True)
    shapes = [(name, index, dim) for name, shape in inputs for index, dim in enumerate(shape) if dims.has_batch(dim)]
    sizes = [(name, index, dims.as_sympy(dim)) for name, index, dim in shapes]
    sizes = [(name, index, size) for name, index, size in sizes if sympy.diff(size, symbol).is_number]
    found = min(sizes, key=lambda each: each[2].subs(symbol, 0) != 0, default=None)
    if found is None:
        return None
    name, index, size = found
    times, by = sympy.fraction(sympy.diff(size, symbol))
    added = by * size.subs(symbol, 0)
    read = f"{name}.shape[{index}]" if by == 1 else f"{name}.shape[{index}] * {by}"
    if added:
        read = f"({read} {'-' if added > 0 else '+'} {abs(added)})"
    return read if times == 1 else f"{read} // {times}"


def split_backward_nodes(block: Block) -> frozenset[str]:
    """Products with trained weights, by first output: nothing in the backward reads their weight gradients, so these can wait."""
    weights = {parameter.value.name for parameter in block.parameters if parameter.trainable and not parameter.buffer}
    out = set()
    for node in block.nodes:
        operands = node.operands()
        if operands and weights.issuperset(operands):
            weights.update(value.name for value in node.outputs)
        elif operation(node.op).splits_backward and operands[1] in weights and not node.no_grad:
            out.add(node.name)
    return frozenset(out)


def _saved_elsewhere(lowered_block: LoweredBlock, names: Iterable[str]) -> list[str]:
    """The lines of those of these values that are offloaded, or saved in parts."""
    axes = dict(lowered_block.state.partitioned)
    lines = []
    for name in names:
        lines += [f"recompute.offload({name})  # saved in host memory"] * (name in lowered_block.state.offloaded)
        if name in axes:
            lines.append(f"recompute.partition({name}, {axes[name]})  # each rank of {axes[name]} saves a part")
    return lines


@dataclass(frozen=True, slots=True)
class _Forward:
    """Writes the forward of one block."""

    lowered: Lowered
    lowered_block: LoweredBlock

    @property
    def block(self) -> Block:
        return self.lowered_block.block

    def lines(self) -> list[str]:
        block = self.block
        self._check_names()
        arguments = "".join(f", {value.name}" for value in block.inputs)
        inside = [
            *self._body(),
            *self._updates(),
            f"return {', '.join(self._name(name) for name in block.outputs)}",
        ]
        if self.lowered_block.selective:
            first = _saved_elsewhere(self.lowered_block, (value.name for value in block.inputs))
            inside = [RECOMPUTE, *(INDENT + line for line in [*first, *inside])]
        body = [*self._header(), *inside]
        return [f"{INDENT}def forward(self{arguments}):", *(f"{INDENT * 2}{line}".rstrip() for line in body)]

    @property
    def _read(self) -> set[str]:
        """The values that something reads."""
        operands = {name for node in self.block.nodes for name in node.operands()}
        return operands | {*self.block.outputs, *(value for _, value in self.block.updates)}

    def _check_names(self) -> None:
        block, partitioned = self.block, self.lowered_block.state.partitioned
        made = [value.name for values in (block.inputs, *(node.outputs for node in block.nodes)) for value in values]
        check_identifiers([*made, *self.lowered.candidate.mesh.names, *(axis for _, axis in partitioned)])
        check_attributes(attribute_of(spec.path) for spec in self.lowered_block.specs)
        for name in (self._read | {buffer for buffer, _ in block.updates}) - {*made}:
            if not any(parameter.value.name == name for parameter in block.parameters):
                refuse(f"{block.name} reads {name[:60]!r}, which it does not have")

    def _name(self, name: str) -> str:
        """The expression of a value. A parameter is an attribute at every use, since FSDP2 swaps in the all-gathered one."""
        for parameter, spec in zip(self.block.parameters, self.lowered_block.specs, strict=True):
            if parameter.value.name == name:
                return f"self.{attribute_of(spec.path)}"
        return name

    def _header(self) -> list[str]:
        used = {str(dict(node.kwargs).get("axis")) for node in self.block.nodes}
        used |= {axis for _, axis in self.lowered_block.state.partitioned}
        lines = [f"{axis} = self.mesh.{axis}" for axis in self.lowered.candidate.mesh.names if axis in used]
        args = [arg for node in self.block.nodes for arg in (*node.args, *(v for _, v in node.kwargs))]
        symbols = [leaf for leaf in leaves(tuple(args)) if isinstance(leaf, Symbol)]
        if self.lowered.uneven:
            sizes = {WHOLE_BATCH if symbol.whole else dims.BATCH for symbol in symbols}
            lines += [f"{name} = {source}" for name, source in BATCH_SIZES.items() if name in sizes]
        elif any(dims.has_batch(symbol.dim) for symbol in symbols):
            read = batch_size_source((value.name, value.shape) for value in self.block.inputs)
            lines.append(f"B = {read}" if read else f"B = {self.lowered.batch}  # of the plan: no input has it")
        return lines

    def _body(self) -> Iterator[str]:
        no_grad = False
        module = ""
        read = self._read
        schedule = self.lowered.schedule
        split = split_backward_nodes(self.block) if schedule is not None and schedule.splits_backward else frozenset[str]()
        for node in self.block.nodes:
            top = node.module.split(".")[0] if node.module else module
            if top != module:
                module = top
                yield f"# {comment(module)}"
                no_grad = False
            if node.no_grad and not no_grad:
                yield "with torch.no_grad():"
            no_grad = node.no_grad
            depth = 2 + no_grad + self.lowered_block.selective
            elsewhere = _saved_elsewhere(self.lowered_block, (value.name for value in node.outputs if value.name in read))
            lines = [*self._statement(node, read, split, len(INDENT) * depth), *elsewhere]
            yield from ((INDENT if no_grad else "") + line for line in lines)

    def _statement(self, node: Node, read: set[str], split: Set[str], indent: int) -> list[str]:
        """The line of a node, with its shape, collectives and source as a comment; two lines where the code is long."""
        targets = [value.name if value.name in read else "_" for value in node.outputs]
        trailing_comma = len(targets) == 1 and operation(node.op).gives_tuple
        recomputed = self.lowered_block.recomputes(node)
        written = recomputed_expression(node, self._name) if recomputed else expression(node, self._name)
        if node.name in split:
            name = node.op.partition(".")[2]
            written = re.sub(rf"\b[FC]\.{name}\b", f"self.split_backward.{name}", written, count=1)
        code = f"{', '.join(targets)}{',' if trailing_comma else ''} = {written}"
        comments = [shape_comment(node.outputs[0].shape)]
        collectives = self._collectives(node)
        comments += [collectives] if collectives else []
        comments += [comment(node.source)] if node.source else []
        rest = ""
        if len(code) + indent > MAX_CODE_WIDTH and "(" in code:
            code, rest = code.split("(", 1)
            code += "("
        line = f"{code:<{COMMENT_COLUMN - indent}}  # {'   '.join(comments)}"
        return [line, INDENT + rest] if rest else [line]

    def _collectives(self, node: Node) -> str:
        """The collectives of a conversion: ``all-gather | backward reduce-scatter``."""
        change = dict(node.kwargs).get("conversion")
        if not isinstance(change, str):
            return ""
        source, target = (parse_placement(text) for text in change.split(" -> "))
        found = axis_conversion(source, target, node.outputs[0].differentiable)
        if found is None:
            return ""
        kinds = (found.forward, found.backward)
        forward, backward = (kind.replace("_", "-") if kind in COLLECTIVES else "" for kind in kinds)
        return " | ".join([forward] * bool(forward) + [f"backward {backward}"] * bool(backward))

    def _updates(self) -> list[str]:
        if not self.block.updates:
            return []
        lines = (f"{INDENT}{self._name(buffer)}.copy_({self._name(value)})" for buffer, value in self.block.updates)
        return ["with torch.no_grad():", *lines]
