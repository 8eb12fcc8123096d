"""The captured graph as what a program must be equal to: operations of each block with arguments by name, equal ones as one; the
calls of blocks, which of them a call in the text is, and which value of the graph a result is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.checker.reader import CANONICAL
from autopar.checker.rows.operation_call import DTypeName, TensorName, WholeCall, bind, tensors_of
from autopar.checker.shards import NotProven, Shape
from autopar.checker.text import Instance
from autopar.ir import dims
from autopar.ir.graph import Arg, Block, Call, DType, Graph, Node, Ref, Symbol, Value, ancestors, draws_masks
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate

RANDOM = frozenset(("ap.dropout", "ap.random", "aten.rand", "aten.randn", "aten.bernoulli", "aten.rand_like", "aten.randn_like"))


def _number(argument: Any) -> Any:
    """Return an argument with ``2.0`` as ``2``: lines are matched by equality, which does not tell them apart."""
    if isinstance(argument, tuple):
        return tuple(map(_number, argument))
    return int(argument) if isinstance(argument, float) and argument.is_integer() else argument


def canonical(op: str) -> str:
    """``aten.add.Tensor`` -> ``aten.add``, and one name for those that are the same. A view of other bits is no reshape."""
    if op == "aten.view.dtype":
        return op
    namespace, name, *_ = op.split(".")
    return f"{namespace}.{CANONICAL.get(name, name)}"


@dataclass(frozen=True, slots=True)
class CapturedOperation:
    """One operation. `operands` are the names of its tensors (of equal values one name), `results` those of what it makes."""

    node: Node
    call: WholeCall
    operands: tuple[str, ...]
    results: tuple[str, ...]
    nodes: list[str] = field(default_factory=list)
    """The names of all equal operations of the graph."""


@dataclass
class CapturedBlock:
    """A block at one size of the whole batch."""

    block: Block
    batch: int
    plan: BlockPlan | None = None
    axis_names: tuple[str, ...] = ()
    """The axes of the plan's mesh."""
    names: dict[str, str] = field(default_factory=dict)
    """For each value the name of the first one that is equal to it."""

    @cached_property
    def values(self) -> dict[str, Value]:
        return self.block.values()

    def shape(self, name: str) -> Shape:
        return dims.shape_at(self.values[name].shape, self.batch)

    def argument(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return TensorName(self.names.get(arg.name, arg.name))
        if isinstance(arg, Symbol):
            return arg.at(self.batch)
        if isinstance(arg, DType):
            return DTypeName(arg.name)
        return tuple(map(self.argument, arg)) if isinstance(arg, tuple) else arg

    @cached_property
    def operations(self) -> tuple[CapturedOperation, ...]:
        return tuple(self._operations())

    def _operations(self) -> Iterator[CapturedOperation]:
        first: dict[Any, CapturedOperation] = {}
        for node in self.block.nodes:
            args, kwargs = map(self.argument, node.args), {name: self.argument(arg) for name, arg in node.kwargs}
            try:
                arguments = bind(node.op, tuple(args), kwargs)
            except ValueError:
                arguments = {str(i): self.argument(arg) for i, arg in enumerate(node.args)} | kwargs
            operands = tuple(each.name for each in tensors_of(arguments, TensorName))
            call = WholeCall(
                canonical(node.op), arguments, tuple(map(self.shape, operands)), tuple(self.shape(v.name) for v in node.outputs),
                tuple(self.values[name].dtype for name in operands), tuple(value.dtype for value in node.outputs),
            )  # fmt: skip
            found = CapturedOperation(node, call, operands, tuple(value.name for value in node.outputs),
                                      [node.name])  # fmt: skip
            given = repr(sorted((name, _number(each)) for name, each in arguments.items()))
            key = (node.op, given, call.results, call.result_dtypes, node.no_grad)
            same = first.get(key) if call.op not in RANDOM and not self._draws(call) else None
            if same is not None:
                same.nodes.append(node.name)
                self.names.update(zip(found.results, same.results, strict=True))
                continue
            first[key] = found
            yield found

    @staticmethod
    def _draws(call: WholeCall) -> bool:
        return bool(call.get("dropout_p", 0.0))

    @cached_property
    def by_operands(self) -> dict[tuple[str, ...], list[CapturedOperation]]:
        out: dict[tuple[str, ...], list[CapturedOperation]] = {}
        for each in self.operations:
            out.setdefault(each.operands, []).append(each)
        return out

    def name(self, value: str) -> str:
        """The one name of equal values."""
        _ = self.operations
        return self.names.get(value, value)

    def planned(self, operation: CapturedOperation) -> list[tuple[tuple[Placements, ...], tuple[Placements, ...]]]:
        """What the plan says of operands and results of equal operations: hints where any cut would be right, and the rule of a
        user's operator."""
        plans = self.plan.nodes if self.plan is not None else ()
        return list(dict.fromkeys((each.operands, each.results) for each in plans if each.node in operation.nodes))

    @cached_property
    def draws(self) -> bool:
        """Whether it has random numbers: then two calls of it are not equal."""
        return any(each.call.op in RANDOM or self._draws(each.call) for each in self.operations)


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

    def arguments(self, number: int, call: Call, given: Sequence[Identity], takes_results: bool) -> list[str]:
        """The inputs of the block that the arguments are, or values that it has computed before: with `takes_results` also its
        results (a total that the call returns)."""
        block, out, free = self.block(call.block), list[str](), set(range(len(call.inputs)))
        own = dict[Identity, str]()
        if takes_results:
            own = {self.value(outer): block.name(inner) for inner, outer in zip(block.block.outputs, call.outputs, strict=True)}
        for each in given:
            if each[0] == number or each in own or self._is_equal_total(each, call):  # which the block has computed before
                out.append(own.get(each, each[1]))
                continue
            same = [k for k in range(len(call.inputs)) if self.value(call.inputs[k]) == each]
            if not same:
                raise NotProven(0, f"the model does not pass {each[1]} to {call.block} at {call.prefix or 'its top'}")
            found = next((k for k in same if k in free), same[0])  # a value and its total are one value of the model
            free.discard(found)
            out.append(block.name(block.block.inputs[found].name))
        return out

    def _is_equal_total(self, total: Identity, call: Call) -> bool:
        """Whether another call of the same block has computed this value of the same inputs and parameters."""
        number, value = total
        other = self.graph.calls[number] if number >= 0 else None
        if other is None or other.block != call.block:
            return False
        block = self.block(call.block).block
        nodes = ancestors(block.nodes, {value})
        read = {value, *(operand for node in nodes for operand in node.operands())}
        inputs = zip(block.inputs, other.inputs, call.inputs, strict=True)
        parameters = zip(block.parameters, other.parameters, call.parameters, strict=True)
        return (
            not any(map(draws_masks, nodes))
            and all(self.value(one) == self.value(two) for each, one, two in inputs if each.name in read)
            and all(one == two for each, one, two in parameters if each.value.name in read)
        )

    def identity(self, number: int, call: Call, value: str) -> Identity:
        block = self.block(call.block)
        for slot, name in enumerate(block.block.outputs):
            if block.name(name) == value:
                return self.value(call.outputs[slot])
        return number, value
