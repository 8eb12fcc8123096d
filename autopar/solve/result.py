"""The result of planning, by a search or by pricing a fixed configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.cost_models.step.evaluate import Evaluation
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, PricedPlan
from autopar.solve.space.grid import GridPoint


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

    def with_plan(self, graph: Graph, plan: PricedPlan, **changes: Any) -> PlanResult:
        """Return the result with another plan, of `graph` where it has none of its own. Where that is below the bound, as one of
        another schedule may be, so is the bound."""
        seconds = plan.evaluation.step_seconds
        bound = min(self.lower_bound_seconds, seconds)
        return replace(
            self, graph=plan.graph or graph, candidate=plan.candidate, evaluation=plan.evaluation, lower_bound_seconds=bound,
            gap=1 - bound / seconds if seconds else 0.0, **changes,
        )  # fmt: skip


def other_results(graph: Graph, result: PlanResult, count: int) -> tuple[PlanResult, ...]:
    """Return up to `count` results with another plan that fits, the shortest predicted steps first: one of each point of the
    grid, and none of that of the chosen plan. `graph`: of plans whose blocks do not differ by stage."""
    out: dict[str, PlanResult] = {}
    for each in sorted(result.alternatives, key=lambda each: each.step_seconds or 0.0):
        plan = each.plan
        if plan is not None and GridPoint.of(plan.candidate) != GridPoint.of(result.candidate) and str(each) not in out:
            out[str(each)] = result.with_plan(graph, plan, status=Status.FEASIBLE, fastest=None)
    return tuple(out.values())[:count]
