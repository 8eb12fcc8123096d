"""A strategy: one way to run an operation on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.dims import Shape
from autopar.ir.placement import Placement

REDUNDANT = "redundant"
PASS = "pass"


@dataclass(frozen=True, slots=True)
class OperationCollective:
    """A collective inside of a named function, on the function's axis. `shape` is the global shape of the tensor that it moves.

    `kind` is ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``point_to_point`` (a message to a neighbour,
    of `shape`); `backward`: it runs in the backward.
    `group` is the number of neighbours on the axis that communicate with each other (0: all). With `tokens`, ranks of other axes
    that shard the tokens are neighbours too. `copies` of a token to ranks of one node are sent once.
    `operand` is the operand that it moves: other axes divide the bytes where they shard that operand (-1: where they shard any).
    `factor`: it is on the axes that shard this factor (empty: the function's own).
    `overlapped`: it overlaps with the computation of the function, one block of the axis at a time (ring attention).
    """

    kind: str
    shape: Shape
    dtype: str
    backward: bool = False
    group: int = 0
    tokens: bool = False
    copies: int = 1
    overlapped: bool = False
    operand: int = -1
    factor: str = ""


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
