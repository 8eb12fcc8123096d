"""Where the relaxation mixes two equal choices so that no plan can be made of what it uses, a solution near it is found."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from autopar.solve.ilp import solver
from autopar.solve.ilp.linear_model import LinearModel, Status
from autopar.solve.ilp.solver import solve, solve_large

_EDGE_COST = 3.0


def two_equal_axes(blocks: int) -> LinearModel:
    """Of each block a strategy, sharded over axis 0 or 1, and a boundary, which must be sharded over the other one: a conversion
    that costs something. Half of each, the relaxation converts nothing."""
    model = LinearModel()
    for _ in range(blocks):
        strategies, boundaries = [[model.binary(), model.binary()] for _ in range(2)]
        edges = {(a, b): model.binary() for a, b in product((0, 1), repeat=2)}
        for group in (strategies, boundaries):
            model.row([(column, 1.0) for column in group], 1.0, 1.0)
        for place in (0, 1):
            model.row([(strategies[place], 1.0), *((edges[place, b], -1.0) for b in (0, 1))], 0.0, 0.0)
            model.row([(boundaries[place], 1.0), *((edges[a, place], -1.0) for a in (0, 1))], 0.0, 0.0)
            model.row([(strategies[place], 1.0), (boundaries[1 - place], -1.0)], 0.0, 0.0)
        model.minimise({edge: _EDGE_COST for (a, b), edge in edges.items() if a != b})
        model.strategy_groups.append(tuple(strategies))
        model.boundary_groups.append(tuple(boundaries))
    return model


def test_a_relaxation_of_halves_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "_LARGE_MODEL", 0)
    model = two_equal_axes(blocks=5)
    assert solve(model, relaxed=True).objective == pytest.approx(0.0)
    lacking: list[int] = []
    with monkeypatch.context() as patched:
        call = solver.call_solver

        def counted(model: LinearModel, *rest: Any) -> solver.Outcome | None:
            lacking.append(model.upper.count(0.0))
            return call(model, *rest)

        patched.setattr(solver, "call_solver", counted)
        found = solve_large(model, time_limit_seconds=10, relative_gap=1e-3)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.objective == pytest.approx(5 * _EDGE_COST)
    assert found.bound == pytest.approx(0.0)
    assert lacking[2] >= 5, "the boundaries are fixed before all binaries are tried"
    assert model.upper == [1.0] * model.variables
