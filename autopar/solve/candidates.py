"""One mesh at a time: solve, price the solution again with the evaluator, and hold both beside each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate
from autopar.solve import ilp
from autopar.solve.decode import decode
from autopar.solve.formulate import formulate
from autopar.solve.formulation import Formulation
from autopar.solve.grid import Point
from autopar.solve.ilp import Outcome, Status
from autopar.solve.memory import least_kept_bytes, limit
from autopar.solve.problem import Problem
from autopar.solve.trim import stay

RATIO = 1.03
"""The evaluator may say at most this many times what the ILP said."""

_TRIES = 4
"""How often a solution that does not fit by the evaluator is solved again with less memory."""


@dataclass(slots=True)
class MeshResult:
    """What is known of one point of the grid. `bound_seconds` is below every plan on it, `excess_bytes` what an infeasible one
    lacks at least. `graph` is that of the candidate, where its blocks differ by stage."""

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
    micro_batches: int = 1
    zero_group: int = 0
    stages: int = 1
    virtual: int = 1
    schedule: str = ""
    graph: Graph | None = None

    def __str__(self) -> str:
        return str(Point(self.mesh, self.micro_batches, self.zero_group, self.stages, self.virtual, self.schedule))

    @property
    def solved(self) -> bool:
        """Whether there is a plan that fits."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

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

    def unlimited(self, time_limit_seconds: float) -> None:
        """Solves without the memory constraint: a bound, and the answer where that plan fits."""
        began = monotonic()
        made = formulate(self.problem, self.sharded_axes)
        self.result.variables, self.result.constraints = made.model.variables, made.model.constraints
        outcome = ilp.solve_large(made.model, time_limit_seconds=time_limit_seconds, relative_gap=self.relative_gap)
        self.result.bound_seconds = max(0.0, self._seconds(made, outcome, outcome.bound))
        if outcome.values:
            self._take(made, outcome)
        else:
            self.result.status = outcome.status
        self.result.seconds += monotonic() - began

    def limited(self, time_limit_seconds: float) -> None:
        """Solves under the memory constraint: placements, state, what is kept, made again and moved to the host, jointly. Tighter
        again where the evaluator finds the solution too large."""
        began = monotonic()
        margin = 0.0
        for attempt in range(_TRIES):
            made = self._joint(margin)
            self.result.variables, self.result.constraints = made.model.variables, made.model.constraints
            left = time_limit_seconds - (monotonic() - began)
            outcome = ilp.solve_large(made.model, time_limit_seconds=left, relative_gap=self.relative_gap)
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

    def relaxed(self, time_limit_seconds: float) -> float | None:
        """Seconds below every plan that fits: the linear relaxation of `limited`. Infinite where nothing fits, None where time
        ends."""
        began = monotonic()
        made = self._joint(0.0)
        outcome = ilp.solve(made.model, relaxed=True, time_limit_seconds=time_limit_seconds)
        self.result.seconds += monotonic() - began
        if outcome.status is Status.INFEASIBLE:
            return float("inf")
        if outcome.status is not Status.OPTIMAL:
            return None
        self.result.bound_seconds = max(self.result.bound_seconds, self._seconds(made, outcome, outcome.bound))
        return self.result.bound_seconds

    def _joint(self, margin_bytes: float) -> Formulation:
        made = formulate(self.problem, self.sharded_axes, replay=True)
        limit(made, margin_bytes)
        return made

    def missing_bytes(self, time_limit_seconds: float) -> float:
        """At least so many bytes each device lacks (linear relaxation), whatever is recomputed; 0 where it may fit."""
        began = monotonic()
        device = self.problem.cluster.device
        obvious = least_kept_bytes(self.problem) - device.room_bytes
        if obvious > 0:
            self.result.seconds += monotonic() - began
            return obvious
        made = formulate(self.problem, replay=True)
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
        result.evaluation = self._price(result.candidate)
        if result.evaluation.fits:
            result.candidate, result.evaluation = stay(result.candidate, result.evaluation, self._price)
        result.status = outcome.status if result.evaluation.fits else Status.TIMEOUT
        # A solution that is not the very best may pay for what decoding leaves out, but never for more than its gap.
        least = self._seconds(made, outcome, outcome.bound) * (1 - 1e-6)
        found = self._seconds(made, outcome, outcome.objective)
        result.objective_seconds = min(found, max(least, result.evaluation.step_seconds))
        ratio = result.evaluation.step_seconds / max(result.objective_seconds, 1e-30)
        if not 1 - 1e-6 <= ratio <= RATIO:
            result.warnings.append(f"{result.mesh}: the evaluator says {ratio:.6f} times what the ILP says")

    def _price(self, candidate: Candidate) -> Evaluation:
        return evaluate(self.graph, candidate, self.problem.cluster, self.problem.optimizer, self.problem.batch_costs)

    @staticmethod
    def _seconds(made: Formulation, outcome: Outcome, objective: float) -> float:
        """Without the penalties for repeated work, which are no time."""
        if outcome.values:
            objective -= sum(outcome.values[variable] * price for variable, price in made.penalties.items())
        elif made.penalties:
            return 0.0 if objective < float("inf") else objective
        return objective * made.second_unit
