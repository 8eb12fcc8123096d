"""The result of planning, by a search or by pricing a fixed configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.step.evaluate import Evaluation
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution
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


def other_results(graph: Graph, result: PlanResult, count: int) -> tuple[PlanResult, ...]:
    """Return up to `count` results with another plan that fits, the shortest predicted steps first: one of each point of the
    grid, and none of that of the chosen plan. `graph`: of plans whose blocks do not differ by stage."""
    out: dict[str, PlanResult] = {}
    fitting = [each for each in result.alternatives if each.candidate is not None and each.evaluation is not None]
    for each in sorted(fitting, key=lambda each: each.step_seconds or 0.0):
        assert each.candidate is not None and each.evaluation is not None
        seconds = each.evaluation.step_seconds
        if GridPoint.of(each.candidate) != GridPoint.of(result.candidate) and str(each) not in out:
            out[str(each)] = replace(
                result, graph=each.graph or graph, candidate=each.candidate, evaluation=each.evaluation, status=Status.FEASIBLE,
                gap=1 - min(result.lower_bound_seconds, seconds) / seconds, fastest=None,
            )  # fmt: skip
    return tuple(out.values())[:count]
