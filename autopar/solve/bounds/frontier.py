"""The convex frontier, from below, of the seconds and bytes of a program: its corners are the optima at prices of a byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from autopar.solve.ilp.linear_model import INFINITY, LinearModel, Status
from autopar.solve.ilp.solver import most_nodes, solve

ROUNDING = 1e-6
"""The relative rounding of the programs."""

_MIN_EDGE = 1e-3
"""Shorter edges of a frontier are not halved."""

_CORNER_GAP = 1e-4
"""The relative gap at which a corner of an integer program counts as found."""


@dataclass(frozen=True, slots=True)
class SavedLine:
    """A half-plane of one call and micro-batch, ``recompute x seconds + saved x bytes >= least``."""

    recompute: float
    saved: float
    least: float


@dataclass(frozen=True, slots=True)
class Corner:
    """A corner: seconds and bytes in shares of the largest ones, and the solution."""

    seconds: float
    bytes: float
    values: tuple[float, ...]


class Frontier:
    """The frontier of a program: `seconds` and `bytes` by column, in shares of the largest ones. `fastest`: the seconds that
    lines do not count. `integer`: of the integer program, not of its relaxation. `lines` are the half-planes and `corners` the
    corners that `solve` has added."""

    def __init__(
        self,
        model: LinearModel,
        seconds: Mapping[int, float],
        bytes: Mapping[int, float],
        most_seconds: float,
        most_bytes: float,
        fastest: float = 0.0,
        seconds_left: float = INFINITY,
        integer: bool = False,
    ) -> None:
        self.model, self.seconds, self.bytes, self.integer = model, seconds, bytes, integer
        self.most_seconds, self.most_bytes, self.fastest = most_seconds, most_bytes, fastest
        self.until = monotonic() + seconds_left
        self.lines: list[SavedLine] = []
        self.corners: list[Corner] = []

    def solve(self, seconds_weight: float, bytes_weight: float) -> Corner | None:
        """Return the corner that is least by these weights, which make a line; None where time ends."""
        model = self.model
        model.cost = [0.0] * model.variables
        model.minimise({column: seconds_weight * each for column, each in self.seconds.items()})
        model.minimise({column: bytes_weight * each for column, each in self.bytes.items()})
        limit = None if self.until == INFINITY else self.until - monotonic()
        if self.integer:
            outcome = solve(model, time_limit_seconds=limit, relative_gap=_CORNER_GAP, nodes=most_nodes(model))
        else:
            outcome = solve(model, time_limit_seconds=limit, relaxed=True)
        if not outcome.values or outcome.status is not Status.OPTIMAL and not self.integer:
            return None
        least = outcome.bound * (1 - ROUNDING) - self.fastest
        self.lines.append(SavedLine(seconds_weight / self.most_seconds, bytes_weight / self.most_bytes, least))
        seconds, size = (sum(outcome.values[column] * each for column, each in of.items()) for of in (self.seconds, self.bytes))
        self.corners.append(Corner(seconds, size, outcome.values))
        return self.corners[-1]

    def halve(self, first: Corner | None, last: Corner | None, depth: int, min_gain: float) -> None:
        """Look for corners between two. Edges that a corner between them lowers by less than `min_gain`, relative, stay."""
        if first is None or last is None or not depth:
            return
        longer, smaller = last.seconds - first.seconds, first.bytes - last.bytes
        if min(longer, smaller) < _MIN_EDGE:
            return
        price = longer / smaller
        corner = self.solve(1.0, price)
        if corner is None:
            return
        if corner.seconds + price * corner.bytes < (first.seconds + price * first.bytes) * (1 - min_gain):
            self.halve(first, corner, depth - 1, min_gain)
            self.halve(corner, last, depth - 1, min_gain)
