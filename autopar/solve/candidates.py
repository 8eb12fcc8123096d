"""One mesh at a time: solve, price the solution again with the evaluator, and hold both beside each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.ir.graph import Graph, draws_masks
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate
from autopar.solve import ilp
from autopar.solve.decode import decode
from autopar.solve.formulate import formulate
from autopar.solve.formulation import Formulation
from autopar.solve.ilp import Outcome, Status
from autopar.solve.memory import least_kept_bytes, limit
from autopar.solve.problem import Problem

RATIO = 1.03
"""The evaluator may say at most this many times what the ILP said."""

_TRIES = 4
"""How often a solution that does not fit by the evaluator is solved again with less memory."""


@dataclass(slots=True)
class MeshResult:
    """What is known of one mesh (with its repeated blocks recomputed, or not). `bound_seconds` is below every plan on it;
    `free_seconds` what is best there without the memory limit; `excess_bytes` what an infeasible one lacks at least."""

    mesh: Mesh
    status: Status = Status.TIMEOUT
    bound_seconds: float = 0.0
    objective_seconds: float = float("inf")
    candidate: Candidate | None = None
    evaluation: Evaluation | None = None
    variables: int = 0
    constraints: int = 0
    seconds: float = 0.0
    excess_bytes: float = 0.0
    warnings: list[str] = field(default_factory=list)
    recompute: bool = False
    free_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.mesh}{', recompute' if self.recompute else ''}"

    @property
    def solved(self) -> bool:
        """Whether there is a plan that fits."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def pressed(self) -> bool:
        """Whether the memory limit forbids the fastest plan, so that keeping less may be faster."""
        slower = self.solved and self.objective_seconds > self.free_seconds * (1 + 1e-3)
        return slower or self.status in (Status.INFEASIBLE, Status.TIMEOUT)

    @property
    def step_seconds(self) -> float | None:
        return self.evaluation.step_seconds if self.evaluation is not None and self.solved else None

    @property
    def peak_memory_bytes(self) -> int | None:
        return self.evaluation.peak_memory_bytes if self.evaluation is not None and self.solved else None


@dataclass(slots=True)
class Attempt:
    """A mesh that is being worked on: its tables, and what came out so far."""

    graph: Graph
    problem: Problem
    sharded_axes: tuple[int, ...]
    relative_gap: float
    result: MeshResult

    def cheap_bound(self) -> float:
        """Seconds below every plan: each operation by its fastest strategy, nothing converted, nothing gathered."""
        twice = self.problem.recompute
        return sum(
            self.graph.count(name) * min((1 + (name in twice)) * c.seconds.forward + c.seconds.backward for c in choices)
            for name, table in self.problem.blocks.items()
            for choices in table.choices.values()
        )

    def recomputed(self) -> Attempt | None:
        """The same mesh with repeated blocks recomputed; None where none can be: random numbers and buffer writes happen once."""
        names = {
            name
            for name, table in self.problem.blocks.items()
            if self.graph.count(name) > 1 and not table.block.updates and not any(map(draws_masks, table.block.nodes))
        }
        if not names or self.problem.recompute:
            return None
        result = MeshResult(
            self.result.mesh, bound_seconds=min(self.result.bound_seconds, self.result.free_seconds), recompute=True
        )
        problem = replace(self.problem, recompute=frozenset(names))
        return Attempt(self.graph, problem, self.sharded_axes, self.relative_gap, result)

    def unlimited(self, time_limit_seconds: float) -> None:
        """Solves without the memory constraint: a bound, and the answer where that plan fits."""
        began = monotonic()
        made = formulate(self.problem, self.sharded_axes)
        self.result.variables, self.result.constraints = made.model.variables, made.model.constraints
        outcome = ilp.solve(made.model, time_limit_seconds=time_limit_seconds, relative_gap=self.relative_gap)
        self.result.bound_seconds = max(0.0, self._seconds(made, outcome, outcome.bound))
        self.result.free_seconds = self.result.bound_seconds
        if outcome.values:
            self._take(made, outcome)
        else:
            self.result.status = outcome.status
        self.result.seconds += monotonic() - began

    def limited(self, time_limit_seconds: float) -> None:
        """Solves under the memory constraint, tighter again where the evaluator finds the solution too large."""
        began = monotonic()
        margin = 0.0
        for attempt in range(_TRIES):
            made = formulate(self.problem, self.sharded_axes)
            limit(made, margin)
            self.result.variables, self.result.constraints = made.model.variables, made.model.constraints
            left = time_limit_seconds - (monotonic() - began)
            outcome = ilp.solve(made.model, time_limit_seconds=left, relative_gap=self.relative_gap)
            if attempt == 0:
                self.result.bound_seconds = max(self.result.bound_seconds, self._seconds(made, outcome, outcome.bound))
            if not outcome.values:
                self.result.status = outcome.status
                break
            self._take(made, outcome)
            if self.result.solved or left <= 0:
                break
            assert self.result.evaluation is not None
            margin += 1.02 * (self.result.evaluation.peak_memory_bytes - self.problem.cluster.device.memory_bytes)
        self.result.seconds += monotonic() - began

    def missing_bytes(self, time_limit_seconds: float) -> float:
        """At least so many bytes each device lacks (linear relaxation); 0 where it may fit."""
        began = monotonic()
        device = self.problem.cluster.device
        obvious = least_kept_bytes(self.problem) + device.base_bytes - device.memory_bytes
        if obvious > 0:
            self.result.seconds += monotonic() - began
            return obvious
        made = formulate(self.problem)
        limit(made, minimise_excess=True)
        outcome = ilp.solve(made.model, relaxed=True, time_limit_seconds=time_limit_seconds)
        self.result.seconds += monotonic() - began
        return max(0.0, outcome.objective) * made.byte_unit if outcome.values else 0.0

    def repeats_everything(self) -> bool:
        """Whether some model axis has nothing to cut: then a smaller axis does as well."""
        used = {
            axis
            for table in self.problem.blocks.values()
            for choices in table.choices.values()
            for choice in choices
            for at in (*choice.plan.operands, *choice.plan.results)
            for axis, place in enumerate(at)
            if isinstance(place, Shard)
        }
        return not used.issuperset(range(1, len(self.problem.mesh.axes)))

    def _take(self, made: Formulation, outcome: Outcome) -> None:
        """Decodes and prices a solution; it counts as solved only if the evaluator says that it fits."""
        result = self.result
        result.candidate = decode(made, outcome.values)
        result.evaluation = evaluate(
            self.graph, result.candidate, self.problem.cluster, self.problem.optimizer, self.problem.batch_costs
        )
        result.objective_seconds = self._seconds(made, outcome, outcome.objective)
        result.status = outcome.status if result.evaluation.fits else Status.TIMEOUT
        ratio = result.evaluation.step_seconds / max(result.objective_seconds, 1e-30)
        if not 1 - 1e-6 <= ratio <= RATIO:
            result.warnings.append(f"{result.mesh}: the evaluator says {ratio:.6f} times what the ILP says")

    @staticmethod
    def _seconds(made: Formulation, outcome: Outcome, objective: float) -> float:
        """Without the penalties for repeated work, which are no time."""
        if outcome.values:
            objective -= sum(outcome.values[variable] * price for variable, price in made.penalties.items())
        elif made.penalties:
            return 0.0 if objective < float("inf") else objective
        return objective * made.second_unit
