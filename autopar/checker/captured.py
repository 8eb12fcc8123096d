"""The captured graph as what a program must be equal to: operations of each block with arguments by name, equal ones as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.checker.reader import CANONICAL
from autopar.checker.rows.operation_call import DTypeName, TensorName, WholeCall, bind, tensors_of
from autopar.checker.shards import Shape
from autopar.ir import dims
from autopar.ir.graph import Arg, Block, DType, Node, Ref, Symbol, Value
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan

RANDOM = frozenset(("ap.dropout", "ap.random", "aten.rand", "aten.randn", "aten.bernoulli", "aten.rand_like", "aten.randn_like"))


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
            key = (node.op, repr(sorted(arguments.items(), key=lambda item: item[0])), call.results, node.no_grad)
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
