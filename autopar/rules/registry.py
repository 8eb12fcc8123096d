"""The registry of sharding rules: an immutable table, which a user extends with `autopar.register_rule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autopar.operations.notation.notation import parse_rule
from autopar.operations.notation.rule import Rule
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
