"""The registry of sharding rules: an immutable table, which a user extends with `autopar.register_rule`; and what a rule gives, a
strategy: one way to run an operation on one mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autopar.ir.placement import Placement
from autopar.operations.notation.notation import parse_rule
from autopar.operations.notation.rule import OperationCollective, Rule
from autopar.operations.table import operations


@dataclass(frozen=True, slots=True)
class Registry:
    """Rules by operation. ``aten.add.Tensor`` is looked up with its overload first, then as ``aten.add``."""

    rules: Mapping[str, Rule] = field(default_factory=lambda: MappingProxyType({}))

    def rule(self, op: str) -> Rule | None:
        return self.rules.get(op) or self.rules.get(".".join(op.split(".")[:2]))

    def register(self, op: str, line: str) -> Registry:
        """This registry with one more rule. `op` is ``ns::name`` or ``ns.name``. ValueError where the line is wrong."""
        parse_rule(line)
        return replace(self, rules=MappingProxyType({**self.rules, op.replace("::", "."): Rule(line, registered=True)}))

    def __reduce__(self) -> tuple[object, ...]:
        return Registry, (dict(self.rules),)


def default_registry(*, published: bool = False) -> Registry:
    """The rules of all operations that a plan may have; with `published` also of those that are only priced."""
    records = (each for each in operations().values() if published or not each.published)
    return Registry(MappingProxyType({each.name: rule for each in records if (rule := each.rule) is not None}))


REDUNDANT = "redundant"
PASS = "pass"


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """Runs the operation (or `function`) on local shards: the placements of operands and results on one mesh axis.

    `operands` are in the order of ``Node.operands()``. `factor` is the sharded factor, ``redundant`` or ``pass`` (Partial in,
    Partial out).
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: str
    function: str = ""
    collectives: tuple[OperationCollective, ...] = ()
    exclusive: bool = False
    """True where no other axis may shard the dimensions that this one shards."""
    factor_size: int = field(default=0, compare=False)
    """The size of the factor, or of each of its parts (0: not known), which all axes together that shard it must divide: groups
    of channels stay whole."""

    def __str__(self) -> str:
        operands, results = (", ".join(map(str, side)) for side in (self.operands, self.results))
        return f"{self.factor}: {operands} -> {results}" + (f" by {self.function}" if self.function else "")
