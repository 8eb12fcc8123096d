"""The calls of blocks in the captured graph: which of them a call in the text is, and which value of the graph a result is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.checker.captured import CapturedBlock
from autopar.checker.shards import NotProven
from autopar.checker.text import Instance
from autopar.ir.graph import Call, Graph
from autopar.ir.plan import Candidate

Identity = tuple[int, str]
"""A value of the graph: (-1, its name between calls), or (number of a call, its name within the block)."""


@dataclass
class GraphCalls:
    """The graph at the batch of a plan. `alias`: of equal values between calls the name of the first."""

    graph: Graph
    candidate: Candidate
    captured: dict[str, CapturedBlock] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alias = self._aliases()

    def block(self, name: str) -> CapturedBlock:
        if name not in self.captured:
            plan = next((each for each in self.candidate.blocks if each.block == name), None)
            self.captured[name] = CapturedBlock(self.graph.block(name), self.candidate.batch, plan, self.candidate.mesh.names)
        return self.captured[name]

    def _aliases(self) -> dict[str, str]:
        """Values between calls that are others: a block hands on an input, returns one value twice, or is called twice alike."""
        out: dict[str, str] = {}
        first: dict[Any, Call] = {}
        for call in self.graph.calls:
            block = self.block(call.block)
            inputs = tuple(out.get(name, name) for name in call.inputs)
            same = first.setdefault((call.block, call.prefix, inputs, call.parameters), call)
            if same is not call and not block.draws:
                out.update((name, out.get(other, other)) for name, other in zip(call.outputs, same.outputs, strict=True))
                continue
            known = {
                block.name(value.name): out.get(name, name) for value, name in zip(block.block.inputs, call.inputs, strict=True)
            }
            for inner, name in zip(block.block.outputs, call.outputs, strict=True):
                out[name] = known.setdefault(block.name(inner), name)
        return out

    def value(self, name: str) -> Identity:
        """A value between calls."""
        return -1, self.alias.get(name, name)

    def calls_at(self, instance: Instance) -> Iterator[tuple[int, Call]]:
        """The calls of the graph at this path whose block the class is named after."""
        for number, call in enumerate(self.graph.calls):
            name = re.sub(r"\W", "_", call.block)
            if call.prefix == instance.prefix and re.fullmatch(rf"(Model)?_?{name}((Totals|Repeated)(_\d+)?)*", instance.block):
                yield number, call

    def arguments(self, number: int, call: Call, given: Sequence[Identity]) -> list[str]:
        """The inputs of the block that the arguments are."""
        block, out, free = self.block(call.block), list[str](), list(range(len(call.inputs)))
        for each in given:
            if each[0] == number:  # a total, which the block has computed before
                out.append(each[1])
                continue
            found = next((k for k in free if self.value(call.inputs[k]) == each), None)
            if found is None:
                raise NotProven(0, f"the model does not pass {each[1]} to {call.block} at {call.prefix or 'its top'}")
            free.remove(found)
            out.append(block.name(block.block.inputs[found].name))
        return out

    def identity(self, number: int, call: Call, value: str) -> Identity:
        block = self.block(call.block)
        for slot, name in enumerate(block.block.outputs):
            if block.name(name) == value:
                return self.value(call.outputs[slot])
        return number, value
