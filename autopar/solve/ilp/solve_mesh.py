"""The solution of one mesh: solve the ILP, price its solution with the evaluator, and compare the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import monotonic

from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.ir.graph import Graph
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate
from autopar.solve.ilp.block_memory import unavoidable_shortage_bytes
from autopar.solve.ilp.decode import decode, trim_offload
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.formulation import Formulation
from autopar.solve.ilp.linear_model import Outcome, Status
from autopar.solve.ilp.memory_events import add_memory_constraint
from autopar.solve.ilp.solver import solve, solve_large
from autopar.solve.problem.divide_calls import divide_calls
from autopar.solve.problem.forced_axes import MOST_REDUNDANT, why_disobeyed
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint

RATIO = 1.03
"""The evaluator's seconds may be at most this many times those of the ILP."""

_ATTEMPTS = 4
"""Attempts to solve a problem with less and less memory, while its solution does not fit by the evaluator."""

_MORE_MEMORY = (0.25, 0.5, 1.0)
"""How much more of the memory the plan may need that some of the equal calls take."""

_REPEAT_TOLERANCE = 1e-6
"""The share of FLOPs above what a forced axis may repeat that is more than rounding."""


@dataclass(slots=True)
class MeshSolution:
    """The state of one point of the grid. `bound_seconds` is below every plan on it; `shortage_bytes` is the least that an
    infeasible one lacks on each device, `refusal` why its plan does not obey a forced degree, `reason` why it was not solved."""

    point: GridPoint
    status: Status = Status.TIMEOUT
    bound_seconds: float = 0.0
    objective_seconds: float = inf
    plan: PricedPlan | None = None
    variables: int = 0
    constraints: int = 0
    shortage_bytes: float = 0.0
    warnings: list[str] = field(default_factory=list)
    refusal: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return str(self.point)

    @property
    def solved(self) -> bool:
        """Whether there is a plan that fits."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    def leave(self, best_seconds: float, min_improvement: float, reason: str) -> None:
        """Leave it unsolved beside a plan of `best_seconds`: pruned where its bound says that nothing on it is faster by
        `min_improvement`, else not tried, for the `reason`."""
        if self.bound_seconds >= best_seconds * (1 - min_improvement):
            self.status = Status.PRUNED
        else:
            room = 1 - self.bound_seconds / best_seconds
            self.status, self.reason = Status.NOT_TRIED, f"{reason}; its bound leaves room for {100 * room:.2g} % less"

    @property
    def step_seconds(self) -> float | None:
        return self.plan.evaluation.step_seconds if self.plan is not None and self.solved else None


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan and its price; `graph` is that of the candidate, where calls of a block have several plans."""

    candidate: Candidate
    evaluation: Evaluation
    graph: Graph | None = None

    def __str__(self) -> str:
        return str(GridPoint.of(self.candidate))

    @property
    def shortage_bytes(self) -> int:
        """The bytes that a device lacks for the plan, 0 where it fits."""
        return max(0, self.evaluation.peak_memory_bytes - self.evaluation.memory_budget_bytes)

    def obeys(self, force: Collection[str]) -> bool:
        """Return whether no forced axis repeats more FLOPs than it may."""
        return all(share <= MOST_REDUNDANT for axis, share in self.evaluation.redundant_share if axis in force)

    def solution(self, bound_seconds: float = 0.0) -> MeshSolution:
        """Return the plan, which fits, as all that is known of its point of the grid."""
        point, seconds = GridPoint.of(self.candidate), self.evaluation.step_seconds
        return MeshSolution(point, Status.FEASIBLE, bound_seconds, seconds, plan=self)


@dataclass(slots=True)
class MeshSolver:
    """The solver of one point of the grid. `problem` are its tables, `result` what is known so far. `program`: that under memory,
    once `relax_with_memory` has bounded it, and `untrimmed` its solution."""

    graph: Graph
    problem: Problem
    sharded_axes: tuple[int, ...]
    relative_gap: float
    result: MeshSolution
    program: Formulation | None = None
    untrimmed: Candidate | None = None

    def solve_without_memory(self, time_limit_seconds: float) -> None:
        """Solve without the memory constraint: a lower bound, and the optimum where that plan fits."""
        form = formulate(self.problem, self.sharded_axes)
        self.result.variables, self.result.constraints = form.model.variables, form.model.constraints
        outcome = self._outcome(form, time_limit_seconds)
        self.result.bound_seconds = max(0.0, self._seconds(form, outcome, outcome.bound))
        if outcome.values:
            self._accept(form, outcome)
        else:
            self.result.status = outcome.status

    def solve_with_memory(self, time_limit_seconds: float, cutoff_seconds: float = inf) -> None:
        """Solve placements, state sharding, and what is saved, recomputed and offloaded, jointly under the memory constraint;
        with a smaller capacity again where the solution does not fit by the evaluator. PRUNED where every plan takes longer than
        `cutoff_seconds`."""
        began = monotonic()
        if self.program is None and self.relax_with_memory(time_limit_seconds) == inf:
            self.result.status = Status.INFEASIBLE
            return
        if self.result.bound_seconds > cutoff_seconds:
            self.result.status = Status.PRUNED
            return
        form, margin = self.program or self._formulate_with_memory(0.0), 0.0
        for _ in range(_ATTEMPTS):
            self.result.variables, self.result.constraints = form.model.variables, form.model.constraints
            left = time_limit_seconds - (monotonic() - began)
            outcome = self._outcome(form, left)
            if not outcome.values:
                self.result.status = outcome.status
                equal_calls = any(self.problem.graph.count(name) > 1 for name in self.problem.blocks)
                if outcome.status is Status.INFEASIBLE and (equal_calls or margin):
                    self.result.status, self.result.reason = Status.NOT_TRIED, "no plan that treats equal layers alike fits"
                break
            self._accept(form, outcome)
            if self.result.solved or self.result.refusal or left <= 0:
                break
            assert self.result.plan is not None
            margin += 1.02 * (self.result.plan.evaluation.peak_memory_bytes - self.problem.cluster.device.budget_bytes)
            form = self.program = self._formulate_with_memory(margin)

    def relax_with_memory(self, time_limit_seconds: float) -> float | None:
        """Return seconds below every plan that fits, also of plans that differ between equal calls: the linear relaxation of
        `solve_with_memory` without the events inside of these. Infinite where nothing fits, None where the time ends."""
        form = self._formulate_with_memory(0.0)
        form.model.upper[form.uneven_excess] = inf
        outcome = solve(form.model, relaxed=True, time_limit_seconds=time_limit_seconds)
        form.model.upper[form.uneven_excess] = 0.0
        if outcome.status is Status.INFEASIBLE:
            return inf
        self.program = form
        if outcome.status is not Status.OPTIMAL:
            return None
        self.result.bound_seconds = max(self.result.bound_seconds, self._seconds(form, outcome, outcome.bound))
        return self.result.bound_seconds

    def divide_calls(self, time_limit_seconds: float) -> None:
        """Look for a faster plan in which some of the equal calls have the plan that is best in more memory (`divide_calls`)."""
        form, frugal, began = self.program, self.untrimmed, monotonic()
        if form is None or frugal is None or self.result.plan is None or not self.result.solved:
            return
        budget = self.problem.cluster.device.budget_bytes / form.byte_unit
        for share in _MORE_MEMORY:
            left = time_limit_seconds - (monotonic() - began)
            if left <= 0:
                break
            form.model.upper[form.excess] = share * budget
            outcome = solve_large(form.model, time_limit_seconds=left, relative_gap=self.relative_gap)
            if not outcome.values or self._seconds(form, outcome, outcome.objective) >= self.result.plan.evaluation.step_seconds:
                continue
            fast = decode(form, outcome.values)
            if why_disobeyed(self.problem, fast, self.sharded_axes):
                continue
            divided = divide_calls(self.problem.boundary, frugal, fast, self._price_of_graph)
            if divided is not None and divided.evaluation.step_seconds < self.result.plan.evaluation.step_seconds:
                price = partial(self._price_of_graph, divided.graph, divided.originals)
                candidate, evaluation = trim_offload(divided.candidate, divided.evaluation, price)
                self.result.plan = PricedPlan(candidate, evaluation, divided.graph)
        form.model.upper[form.excess] = 0.0

    def _outcome(self, form: Formulation, time_limit_seconds: float) -> Outcome:
        """Solve a program; once more with repeated FLOPs of a forced axis forbidden where these are cheaper than to shard in
        spite of their price (small operations on slow links). The first outcome stays where nothing obeys that."""
        began = monotonic()
        outcome = solve_large(form.model, time_limit_seconds=time_limit_seconds, relative_gap=self.relative_gap)
        if not outcome.values or all(outcome.values[slack] <= _REPEAT_TOLERANCE for slack in form.penalties):
            return outcome
        for slack in form.penalties:
            form.model.upper[slack] = 0.0
        left = time_limit_seconds - (monotonic() - began)
        obeying = solve_large(form.model, time_limit_seconds=left, relative_gap=self.relative_gap) if left > 0 else outcome
        return obeying if obeying.values else outcome

    def _formulate_with_memory(self, margin_bytes: float) -> Formulation:
        form = formulate(self.problem, self.sharded_axes, recompute=True)
        add_memory_constraint(form, margin_bytes)
        return form

    def shortage_bytes(self) -> float:
        """Return the least bytes that a device lacks (linear relaxation), whatever is recomputed or offloaded; 0 where a plan may
        fit."""
        unavoidable = unavoidable_shortage_bytes(self.problem)
        if unavoidable > 0:
            return unavoidable
        form = formulate(self.problem, recompute=True)
        add_memory_constraint(form, minimise_excess=True)
        outcome = solve(form.model, relaxed=True)
        return max(0.0, outcome.objective) * form.byte_unit if outcome.values else 0.0

    def has_useless_axis(self) -> bool:
        """Return whether some model axis shards nothing in any strategy: then a smaller axis does as well."""
        used = {
            axis
            for table in self.problem.blocks.values()
            for strategies in table.strategies.values()
            for strategy in strategies
            for at in (*strategy.plan.operands, *strategy.plan.results)
            for axis, place in enumerate(at)
            if isinstance(place, Shard)
        }
        return not used.issuperset(range(1, len(self.problem.mesh.axes)))

    def _accept(self, form: Formulation, outcome: Outcome) -> None:
        """Decode and price a solution. It counts as solved only if it fits by the evaluator."""
        result, candidate = self.result, decode(form, outcome.values)
        evaluation = self._price(candidate)
        self.untrimmed = candidate
        if evaluation.fits:
            candidate, evaluation = trim_offload(candidate, evaluation, self._price)
        result.plan = PricedPlan(candidate, evaluation)
        result.status = outcome.status if evaluation.fits else Status.TIMEOUT
        result.refusal = why_disobeyed(self.problem, candidate, self.sharded_axes)
        if result.refusal:
            result.status = Status.INFEASIBLE
        # A solution within the gap may pay for conversions that decoding leaves out, but for no more than its gap.
        least = self._seconds(form, outcome, outcome.bound) * (1 - 1e-6)
        seconds = self._seconds(form, outcome, outcome.objective)
        result.objective_seconds = min(seconds, max(least, evaluation.step_seconds))
        ratio = evaluation.step_seconds / max(result.objective_seconds, 1e-30)
        if not 1 - 1e-6 <= ratio <= RATIO:
            result.warnings.append(f"{result.point.mesh}: the evaluator says {ratio:.6f} times what the ILP says")

    def _price(self, candidate: Candidate) -> Evaluation:
        return evaluate(self.graph, candidate, self.problem.cluster, self.problem.optimizer, self.problem.batch_costs)

    def _price_of_graph(self, graph: Graph, originals: Mapping[str, str], candidate: Candidate) -> Evaluation:
        costs = {name: self.problem.batch_costs[original] for name, original in originals.items()}
        return evaluate(replace(graph, batch=self.graph.batch), candidate, self.problem.cluster, self.problem.optimizer, costs)

    @staticmethod
    def _seconds(form: Formulation, outcome: Outcome, objective: float) -> float:
        """Return the seconds of an objective without the penalties for redundant FLOPs, which are not seconds."""
        if outcome.values:
            objective -= sum(outcome.values[variable] * price for variable, price in form.penalties.items())
        elif form.penalties:
            return 0.0 if objective < inf else objective
        return objective * form.second_unit
