"""A strategy: one way to run an operation on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.placement import Placement
from autopar.operations.notation.rule import OperationCollective

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
    """Whether no other axis may shard the dimensions that this one shards."""
    factor_size: int = field(default=0, compare=False)
    """The size of the factor, or of each of its parts (0: not known), which all axes together that shard it must divide: groups
    of channels stay whole."""

    def __str__(self) -> str:
        operands, results = (", ".join(map(str, side)) for side in (self.operands, self.results))
        return f"{self.factor}: {operands} -> {results}" + (f" by {self.function}" if self.function else "")
