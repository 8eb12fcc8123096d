"""The result of planning, by a search or by pricing a fixed configuration."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.step.evaluate import Evaluation
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status


@dataclass(frozen=True, slots=True)
class Fastest:
    """The plan of the shortest predicted step in words, where another one was chosen."""

    plan: str
    step_seconds: float


PROVEN_GAP = 1e-3
"""A plan with a larger gap is not called optimal: so much a search may leave (`SearchOptions.min_improvement`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The plan that was chosen: `graph` is that of the candidate (pipeline stages may have blocks of their own), `evaluation` its
    predicted step. `lower_bound_seconds` is below the step of every plan on every point of the grid (whose schedules are the
    named ones) and not above the plan's; `gap` is relative to the step. `solutions` has every point that was looked at,
    `alternatives` all plans that fit. `fastest`: where that is another plan
    than the chosen one (`robust_choice`). `cut_short`: what ended the search before its own limits did, in words, empty where
    nothing did; then another machine may find another plan, or another bound. `warnings` would be bugs: an evaluator and an ILP
    that disagree."""

    graph: Graph
    candidate: Candidate
    evaluation: Evaluation
    status: Status
    lower_bound_seconds: float
    gap: float
    solutions: tuple[MeshSolution, ...]
    alternatives: tuple[MeshSolution, ...] = ()
    fastest: Fastest | None = None
    cut_short: str = ""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.status is Status.OPTIMAL and self.gap > PROVEN_GAP:
            object.__setattr__(self, "status", Status.FEASIBLE)
