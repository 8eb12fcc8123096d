"""What one operation may do on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.dims import Shape
from autopar.ir.placement import Placement

REDUNDANT = "redundant"
PASS = "pass"


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """What a named function communicates on its axis. `shape` is the global shape of the tensor that is communicated.

    `kind` is ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``; `backward`: it runs in the backward.
    `group` is how many neighbours on the axis do it among themselves (0: all). Where `tokens` move, other axes that cut the
    tokens take part: neighbours are then ranks of these axes too. `copies` of a token that go to members on one node travel once.
    `operand` is the one that moves: another axis has a share of the bytes only where it cuts that (-1: where it cuts any work).
    `behind`: it travels while the function computes what came before, block by block of the axis.
    """

    kind: str
    shape: Shape
    dtype: str
    backward: bool = False
    group: int = 0
    tokens: bool = False
    copies: int = 1
    behind: bool = False
    operand: int = -1


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """Run the operation (or `function`) on local shards: where operands must be and where results then are, on one axis.

    `operands` are in the order of ``Node.operands()``. `label` is the sharded factor, ``redundant`` or ``pass``.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    label: str
    function: str = ""
    collectives: tuple[InnerCollective, ...] = ()
    alone: bool = False
    """Whether no other axis may cut the dimensions that this one cuts."""

    def __str__(self) -> str:
        operands, results = (", ".join(map(str, side)) for side in (self.operands, self.results))
        return f"{self.label}: {operands} -> {results}" + (f" by {self.function}" if self.function else "")
