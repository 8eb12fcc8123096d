"""A linear model under construction: columns and rows in plain lists; and the outcome of minimising it. No solver here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Terms = Mapping[int, float]
"""A linear expression: coefficient per variable."""

INFINITY = float("inf")


@dataclass(slots=True)
class LinearModel:
    """Minimise ``cost . x`` under ``row_lower <= A x <= row_upper`` and bounds. Variables and rows are numbered."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    entry_row: list[int] = field(default_factory=list)
    entry_column: list[int] = field(default_factory=list)
    entry_value: list[float] = field(default_factory=list)
    zero_groups: list[tuple[int, ...]] = field(default_factory=list)
    """one-hot groups of binaries, the ZeRO stages of a block, which the linear relaxation mixes"""
    boundary_groups: list[tuple[int, ...]] = field(default_factory=list)
    """one-hot groups of binaries; once each has its choice, the model falls apart into small ones"""
    strategy_groups: list[tuple[int, ...]] = field(default_factory=list)
    """one-hot groups of binaries that nearly all other binaries follow from"""

    @property
    def variables(self) -> int:
        return len(self.lower)

    @property
    def constraints(self) -> int:
        return len(self.row_lower)

    def variable(self, upper: float = INFINITY, *, integer: bool = False, lower: float = 0.0) -> int:
        """Add a column, and return its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.cost.append(0.0)
        return len(self.lower) - 1

    def binary(self) -> int:
        """Add a column that is 0 or 1."""
        return self.variable(1.0, integer=True)

    def shares(self, count: int, *, integer: bool = False) -> list[int]:
        """Add so many columns from 0 to 1, and return their numbers."""
        first = len(self.lower)
        self.lower += [0.0] * count
        self.upper += [1.0] * count
        self.integer += [integer] * count
        self.cost += [0.0] * count
        return list(range(first, first + count))

    def row(self, terms: Terms | Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """Add the row ``lower <= terms <= upper``. A variable must occur once."""
        entries = terms if isinstance(terms, dict) else dict(terms)
        if not all(entries.values()):
            entries = {column: value for column, value in entries.items() if value}
        self.entry_row += [len(self.row_lower)] * len(entries)
        self.entry_column += entries
        self.entry_value += entries.values()
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def conserve(
        self, edges: Sequence[tuple[int, int]], flow: Sequence[int], supplies: Sequence[Terms], constants: Sequence[float]
    ) -> None:
        """Add the row ``supply + flow into it - flow out of it = constant`` of each vertex that has edges (source, target) or a
        supply. `flow`: the column of each edge."""
        rows: dict[int, int] = {}
        ends = {end for edge in edges for end in edge}
        for vertex, (supply, constant) in enumerate(zip(supplies, constants, strict=True)):
            if supply or vertex in ends:
                rows[vertex] = self.constraints
                self.row(supply, constant, constant)
        self.entry_row += [rows[end] for edge in edges for end in edge]
        self.entry_column += [column for column in flow for _ in range(2)]
        self.entry_value += [-1.0, 1.0] * len(edges)

    def at_least_each(self, variables: Sequence[int], others: Sequence[int]) -> None:
        """Add the row ``variable >= other`` for each pair."""
        count, first = len(variables), len(self.row_lower)
        self.entry_row += [number for number in range(first, first + count) for _ in range(2)]
        self.entry_column += [column for pair in zip(variables, others, strict=True) for column in pair]
        self.entry_value += [1.0, -1.0] * count
        self.row_lower += [0.0] * count
        self.row_upper += [INFINITY] * count

    def at_least(self, variable: int, terms: Terms, constant: float = 0.0) -> None:
        """Add the row ``variable >= terms + constant``."""
        self.row(total((1.0, {variable: 1.0}), (-1.0, terms)), constant, INFINITY)

    def define(self, terms: Terms) -> int:
        """Add a variable that equals the expression."""
        variable = self.variable(lower=-INFINITY)
        self.row(total((1.0, {variable: 1.0}), (-1.0, terms)), 0.0, 0.0)
        return variable

    def minimise(self, terms: Terms) -> None:
        """Add the terms to the objective."""
        for variable, value in terms.items():
            self.cost[variable] += value


class Status(StrEnum):
    """The status of a solution. `FEASIBLE`: the solution is not proven optimal. `TIMEOUT`: time ended without a solution.
    `PRUNED`: not solved, since its bound is above a known plan. `NOT_TRIED`: not solved, although its bound leaves room for a
    better plan."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    TIMEOUT = "TIMEOUT"
    INFEASIBLE = "INFEASIBLE"
    PRUNED = "PRUNED"
    NOT_TRIED = "NOT TRIED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a solver: `values` per variable (empty without a solution); `objective` of them; `bound` below every
    solution."""

    status: Status
    values: tuple[float, ...]
    objective: float
    bound: float


def add(into: dict[int, float], terms: Terms, factor: float = 1.0) -> None:
    """Add terms in place: ``into += factor * terms``."""
    for variable, value in terms.items():
        into[variable] = into.get(variable, 0.0) + factor * value


def total(*parts: tuple[float, Terms]) -> dict[int, float]:
    """The weighted sum of expressions."""
    out: dict[int, float] = {}
    for factor, terms in parts:
        if out:
            add(out, terms, factor)
        else:
            out = {variable: factor * value for variable, value in terms.items()}
    return out
