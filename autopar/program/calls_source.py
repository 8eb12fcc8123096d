"""Calls of blocks as text: the attributes that hold the block modules, and the lines that call them, with loops over layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Call
from autopar.passes.base import fresh_name
from autopar.passes.lowered import Lowered
from autopar.passes.readable_names import RESERVED, identifier
from autopar.program.block_source import INDENT
from autopar.program.checks import USED, attribute_of, check_identifiers, class_names, quoted
from autopar.program.loops import Loop, last_uses, loops_of_calls
from autopar.runtime.attribute_names import RESERVED_ATTRIBUTES

NUMBER = re.compile(r"\d+")
PATH = re.compile(r"[\w.]*")
COUNTER = re.compile(r"[_\d]+$")


def attribute_stem(text: str) -> str:
    """The attribute name of a class: ``LlamaDecoderLayer`` is ``llama_decoder_layer``."""
    return identifier(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text.rsplit(".", 1)[-1]).lower())


def fresh_variable(name: str, taken: set[str]) -> str:
    """A new variable for a value of the graph: its name without the trailing number."""
    return fresh_name(identifier(COUNTER.sub("", name) or name), taken)


@dataclass(slots=True)
class CallsWriter:
    """Writes `calls`, whose `results` are returned. Names are assigned in the order of the calls.

    Attributes:
        names: the variable of each value, at first those of the inputs.
        attributes, variables: the names that are taken.
        init_lines: lines of ``__init__``, which construct the block modules.
        forward_lines: lines of the forward, which call them.
        carried: for an input slot of a loop's body, the variable that is carried from one repetition to the next.
    """

    lowered: Lowered
    calls: Sequence[Call]
    results: Sequence[str]
    names: dict[str, str]
    attributes: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    init_lines: list[str] = field(default_factory=list)
    forward_lines: list[str] = field(default_factory=list)
    carried: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_identifiers(self.names.values(), USED)
        self.variables |= RESERVED | set(self.names.values())

    @property
    def classes(self) -> dict[str, str]:
        return class_names(block.block.name for block in self.lowered.blocks)

    def write(self) -> None:
        """Writes all calls."""
        for loop in loops_of_calls(self.calls, self.results):
            attributes = [self.add_attribute(self._calls_at(loop, offset)) for offset in range(len(loop.body))]
            self._write_loop(loop, attributes)

    def write_call(self, call: Call) -> None:
        """Writes a call that is not among `calls`."""
        self.forward_lines.append(self._line(call, f"self.{self.add_attribute([call])}", {}))

    def _calls_at(self, loop: Loop, offset: int) -> list[Call]:
        """The calls of all repetitions at one position of the body."""
        return [self.calls[loop.start + number * len(loop.body) + offset] for number in range(loop.repetitions)]

    # -- __init__

    def init_method(self) -> list[str]:
        """The lines of ``__init__``; none where it constructs nothing."""
        if not self.init_lines:
            return []
        lines = ["super().__init__(mesh)", *self.init_lines]
        return [f"{INDENT}def __init__(self, mesh):", *(f"{INDENT * 2}{line}" for line in lines), ""]

    def add_attribute(self, calls: list[Call]) -> str:
        """The attribute of the block module of these calls (of several: a ModuleList); adds its lines of ``__init__``."""
        first, many = calls[0], len(calls) > 1
        path = first.prefix.split(".")
        while many and len(path) > 1 and path[-1].isdigit():
            path.pop()
        while not many and len(path) > 1 and path[-1].isdigit():
            path = [*path[:-2], f"{path[-2]}_{path[-1]}"]
        name = identifier(path[-1]) if first.prefix else attribute_stem(first.block)
        attribute = fresh_name(attribute_of(name), self.attributes)
        check_identifiers([attribute], RESERVED_ATTRIBUTES)
        if not many:
            self.init_lines.append(f"self.{attribute} = {self._constructor(first)}")
            return attribute
        counted = self._comprehension(calls)
        if counted is not None:
            self.init_lines.append(f"self.{attribute} = nn.ModuleList({counted})")
        else:
            self.init_lines.append(f"self.{attribute} = nn.ModuleList(")
            self.init_lines += [f"{INDENT}[", *(f"{INDENT * 2}{self._constructor(call)}," for call in calls), f"{INDENT}]", ")"]
        return attribute

    def _other_names(self, call: Call) -> dict[str, str]:
        """The original names of parameters that are not prefix + path."""
        dotted = f"{call.prefix}." if call.prefix else ""
        specs = self.lowered.block(call.block).specs
        pairs = zip(specs, call.parameters, strict=True)
        return {spec.path: name for spec, name in pairs if name != dotted + spec.path}

    def _constructor(self, call: Call) -> str:
        names = self._other_names(call)
        written = ", ".join(f"{quoted(path)}: {quoted(name)}" for path, name in names.items())
        return f"{self.classes[call.block]}(mesh, {quoted(call.prefix)}{f', {{{written}}}' if names else ''})"

    def _comprehension(self, calls: list[Call]) -> str | None:
        """A comprehension, where prefixes count in steps and names are regular."""
        numbers = [[int(n) for n in NUMBER.findall(call.prefix)] for call in calls]
        shapes = {NUMBER.sub("#", call.prefix) for call in calls}
        plain = all(PATH.fullmatch(call.prefix) for call in calls)
        if not plain or len(shapes) > 1 or not numbers[0] or any(self._other_names(call) for call in calls):
            return None
        varying = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
        if len(varying) != 1:
            return None
        column = [row[varying[0]] for row in numbers]
        step = column[1] - column[0]
        if step < 1 or column != list(range(column[0], column[-1] + 1, step)):
            return None
        places = iter(range(len(numbers[0])))
        template = NUMBER.sub(lambda match: "{i}" if next(places) == varying[0] else match[0], calls[0].prefix)
        bounds = [column[0], column[-1] + 1, step] if step > 1 else [column[0], column[-1] + 1][column[0] == 0 :]
        return f'{self.classes[calls[0].block]}(mesh, f"{template}") for i in range({", ".join(map(str, bounds))})'

    # -- forward

    def _write_loop(self, loop: Loop, attributes: list[str]) -> None:
        if loop.repetitions == 1:
            (call,) = loop.body
            self.forward_lines.append(self._line(call, f"self.{attributes[0]}", {}))
            return
        carried = self._enter_loop(loop)
        singular = [identifier(name.removesuffix("s") if name[1:].endswith("s") else "block") for name in attributes]
        blocks = [fresh_name(name, self.variables) for name in singular]
        lists = [f"self.{attribute}" for attribute in attributes]
        over = lists[0] if len(lists) == 1 else f"zip({', '.join(lists)}, strict=True)"
        self.forward_lines.append(f"for {', '.join(blocks)} in {over}:")
        for index, call in enumerate(loop.body):
            own = {slot: name for (i, slot), name in carried.items() if i == index}
            self.forward_lines.append(INDENT + self._line(call, blocks[index], own))
        for first, last in zip(loop.body, loop.last, strict=True):
            for in_body, after_loop in zip(first.outputs, last.outputs, strict=True):
                self.names[after_loop] = self.names[in_body]

    def _enter_loop(self, loop: Loop) -> dict[tuple[int, int], str]:
        """A variable for each carried output, initialised before the loop; reuses that of its initial value if possible."""
        uses = last_uses(self.calls, self.results)
        carried_slots = {slot for slot, _ in loop.carried}
        slots = [(i, k, name) for i, call in enumerate(loop.body) for k, name in enumerate(call.inputs)]
        constant = {name for i, k, name in slots if (i, k) not in carried_slots}
        out: dict[tuple[int, int], str] = {}
        reused: set[str] = set()
        for (i, k), source in loop.carried:
            initial = loop.body[i].inputs[k]
            if source not in out:
                free = uses[initial] < loop.start + len(loop.body) and initial not in constant and initial not in reused
                reused.add(initial)
                out[source] = (
                    self.names[initial] if free else fresh_variable(loop.body[source[0]].outputs[source[1]], self.variables)
                )
                if not free:
                    self.forward_lines.append(f"{out[source]} = {self.names[initial]}")
            self.carried[loop.start + i, k] = out[source]
        return out

    def _line(self, call: Call, block: str, own: dict[int, str]) -> str:
        position = next((index for index, each in enumerate(self.calls) if each is call), -1)
        inputs = [self.carried.get((position, k)) or self.names[name] for k, name in enumerate(call.inputs)]
        for slot, name in enumerate(call.outputs):
            self.names[name] = own.get(slot) or fresh_variable(name, self.variables)
        return f"{', '.join(self.names[name] for name in call.outputs)} = {block}({', '.join(inputs)})"
