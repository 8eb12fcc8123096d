"""The class of one distinct block as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import sympy

from autopar.ir import dims
from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Block, Node, Symbol, draws_masks
from autopar.ir.placement import parse_placement
from autopar.passes.lowered import Lowered, LoweredBlock, Spec
from autopar.program.names import attribute_of, class_names
from autopar.program.operations import called_again, expression
from autopar.rules.conversions import conversion

INDENT = "    "
COMMENT_COLUMN = 84
LONG = 110
AGAIN = f"{'with Again(self.mesh.host) as again:':<{COMMENT_COLUMN - 8}}  # the backward runs once more what runs by it"
LATER = {
    "aten.linear": ("F.linear", "self.later.linear"),
    "ap.linear_kn": ("C.linear_kn", "self.later.linear_kn"),
}
"""Products as they are written, and where a schedule splits the backward."""
TUPLES = ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "ap.convert_many")
WORDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
}


def class_lines(lowered: Lowered, block: LoweredBlock) -> list[str]:
    """The whole class."""
    calls = [call for call in lowered.every_call if call.block == block.block.name]
    prefixes = [call.prefix or "the model's own" for call in calls]
    where = prefixes[0] if len(prefixes) == 1 else f"{prefixes[0]} .. {prefixes[-1]}, {len(prefixes)} times"
    name = class_names([block.block.name])[block.block.name]
    lines = [f"class {name}(Block):", f'{INDENT}"""{where}"""', "", f"{INDENT}zero = {block.zero}"]
    lines += [f"{INDENT}recompute = True"] * block.recompute
    lines += [f"{INDENT}replays = True"] * block.replays
    lines += [f"{INDENT}draws = True"] * (block.recompute and any(map(draws_masks, block.block.nodes)))
    lines += [f"{INDENT}noise = True"] * any(node.op == "ap.random" for node in block.block.nodes)
    lines += [f"{INDENT}batch_statistics = True"] * bool(block.block.updates)
    lines += _spec_lines(block.specs)
    return [*lines, "", *_Forward(lowered, block).lines()]


def _spec_lines(specs: Iterable[Spec]) -> list[str]:
    written = [f"{INDENT * 2}{_spec(spec)}," for spec in specs]
    return [f"{INDENT}specs = (", *written, f"{INDENT})"] if written else [f"{INDENT}specs = ()"]


def _spec(spec: Spec) -> str:
    words = [f'"{spec.path}"', repr(spec.shape), f'"{spec.dtype}"']
    words.append("{" + ", ".join(f'"{axis}": "{where}"' for axis, where in spec.placements) + "}")
    words += ["trainable=False"] * (not spec.trainable) + ["buffer=True"] * spec.buffer
    return f"Parameter({', '.join(words)})"


def shape_comment(shape: Shape) -> str:
    """``B 2048 512``; nothing for a scalar."""
    return " ".join(str(dim).replace("*", "") if isinstance(dim, str) else str(dim) for dim in shape) or "()"


def _symbols(arg: Arg) -> Iterator[Symbol]:
    if isinstance(arg, Symbol):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _symbols(item)


def batch_source(inputs: Iterable[tuple[str, Shape]]) -> str | None:
    """How to read ``B`` from the shape of an input: ``x.shape[0]`` or ``x.shape[0] // 16``."""
    symbol = sympy.Symbol(dims.BATCH, integer=True, positive=True)
    for name, shape in inputs:
        for index, dim in enumerate(shape):
            ratio = dims.expression(dim) / symbol
            if isinstance(dim, str) and ratio.is_number:
                times, by = sympy.fraction(ratio)
                read = f"{name}.shape[{index}]"
                read = read if by == 1 else f"{read} * {by}"
                return read if times == 1 else f"{read} // {times}"
    return None


def deferrable(block: Block) -> frozenset[str]:
    """Products with trained weights (their first outputs): their gradient is of use to nobody before the optimizer's step."""
    weights = {parameter.value.name for parameter in block.parameters if parameter.trainable and not parameter.buffer}
    out = set()
    for node in block.nodes:
        operands = node.operands()
        if operands and weights.issuperset(operands):
            weights.update(value.name for value in node.outputs)
        elif node.op in LATER and operands[1] in weights and not node.no_grad:
            out.add(node.name)
    return frozenset(out)


def _offload(name: str) -> str:
    return f"again.offload({name})  # waits on the host"


@dataclass(frozen=True, slots=True)
class _Forward:
    """Writes the forward of a block."""

    lowered: Lowered
    lowered_block: LoweredBlock

    @property
    def block(self) -> Block:
        return self.lowered_block.block

    def lines(self) -> list[str]:
        block = self.block
        arguments = "".join(f", {value.name}" for value in block.inputs)
        inside = [
            *self._body(),
            *self._updates(),
            f"return {', '.join(self._name(name) for name in block.outputs)}",
        ]
        if self.lowered_block.replays:
            inputs = [value.name for value in block.inputs if value.name in self.lowered_block.offload]
            inside = [AGAIN, *(INDENT + line for line in [*map(_offload, inputs), *inside])]
        body = [*self._header(), *inside]
        return [f"{INDENT}def forward(self{arguments}):", *(f"{INDENT * 2}{line}".rstrip() for line in body)]

    def _name(self, name: str) -> str:
        """A parameter is read where it is used: FSDP2 puts the gathered one there."""
        for parameter, spec in zip(self.block.parameters, self.lowered_block.specs, strict=True):
            if parameter.value.name == name:
                return f"self.{attribute_of(spec.path)}"
        return name

    def _header(self) -> list[str]:
        used = {str(dict(node.kwargs).get("axis")) for node in self.block.nodes}
        lines = [f"{axis} = self.mesh.{axis}" for axis in self.lowered.mesh.names if axis in used]
        symbols = [s for node in self.block.nodes for arg in (*node.args, *(v for _, v in node.kwargs)) for s in _symbols(arg)]
        if any(dims.has_batch(symbol.dim) for symbol in symbols):
            read = batch_source((value.name, value.shape) for value in self.block.inputs)
            lines.append(f"B = {read}" if read else f"B = {self.lowered.batch}  # of the plan: no input tells")
        return lines

    def _body(self) -> Iterator[str]:
        quiet = False
        module = ""
        read = {name for node in self.block.nodes for name in node.operands()}
        read |= {*self.block.outputs, *(value for _, value in self.block.updates)}
        schedule = self.lowered.schedule
        later = deferrable(self.block) if schedule is not None and schedule.splits_backward else frozenset[str]()
        for node in self.block.nodes:
            top = node.module.split(".")[0] if node.module else module
            if top != module:
                module = top
                yield f"# {module}"
                quiet = False
            if node.no_grad and not quiet:
                yield "with torch.no_grad():"
            quiet = node.no_grad
            deep = 2 + quiet + self.lowered_block.replays
            left = [_offload(value.name) for value in node.outputs if value.name in self.lowered_block.offload]
            lines = [*self._statement(node, read, later, len(INDENT) * deep), *left]
            yield from ((INDENT if quiet else "") + line for line in lines)

    def _statement(self, node: Node, read: set[str], later: Set[str], indent: int) -> list[str]:
        """One line, or two where a call of the runtime is long."""
        targets = [value.name if value.name in read else "_" for value in node.outputs]
        alone = len(targets) == 1 and ".".join(node.op.split(".")[:2]) in TUPLES
        again = self.lowered_block.runs_again(node)
        written = called_again(node, self._name) if again else expression(node, self._name)
        if node.name in later:
            plain, deferred = LATER[node.op]
            written = written.replace(plain, deferred, 1)
        code = f"{', '.join(targets)}{',' if alone else ''} = {written}"
        comments = [shape_comment(node.outputs[0].shape)]
        told = self._collectives(node)
        comments += [told] if told else []
        comments += [node.source] if node.source else []
        rest = ""
        if len(code) + indent > LONG and "(" in code:
            code, rest = code.split("(", 1)
            code += "("
        line = f"{code:<{COMMENT_COLUMN - indent}}  # {'   '.join(comments)}"
        return [line, INDENT + rest] if rest else [line]

    def _collectives(self, node: Node) -> str:
        """``all-gather | backward reduce-scatter``."""
        move = dict(node.kwargs).get("move")
        if not isinstance(move, str):
            return ""
        source, target = (parse_placement(text) for text in move.split(" -> "))
        found = conversion(source, target, node.outputs[0].differentiable)
        if found is None:
            return ""
        forward, backward = (WORDS.get(kind or "", "") for kind in (found.forward, found.backward))
        return " | ".join([forward] * bool(forward) + [f"backward {backward}"] * bool(backward))

    def _updates(self) -> list[str]:
        if not self.block.updates:
            return []
        lines = ["if self.training:", f"{INDENT}with torch.no_grad():"]
        return lines + [f"{INDENT * 2}{self._name(buffer)}.copy_({self._name(value)})" for buffer, value in self.block.updates]
