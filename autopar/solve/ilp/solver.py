"""Solvers of a `LinearModel`: HiGHS, with SCIP (GLOP for relaxations) as fallback and cross-check; large ones by branching on few
of their binaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from queue import Queue
from threading import Thread, current_thread, main_thread
from time import monotonic
from typing import TypeVar

from autopar.solve.ilp.linear_model import LinearModel, Outcome, Status
from autopar.solve.ilp.solver_call import SolverName, call_solver

T = TypeVar("T")

_LARGE_MODEL = 1500
"""Variables from which on the linear relaxation is solved first."""

_LARGE_GAP = 1e-3
"""The relative gap at which a large model counts as solved."""

_MAX_NODES = 40
"""Nodes of the branching at most."""

_NODE_VARIABLES = 300_000
"""Nodes of an integer program times its variables at most: some seconds, whatever its size."""


def solve(
    model: LinearModel,
    *,
    solver: SolverName = "highs",
    time_limit_seconds: float | None = None,
    relative_gap: float = 1e-6,
    relaxed: bool = False,
    iterations: int | None = None,
    nodes: int | None = None,
) -> Outcome:
    """Minimise the objective of a model. `relaxed` drops integrality: the root LP. Limits: see `call_solver`."""

    def call(name: SolverName) -> Outcome | None:
        return _interruptible(partial(call_solver, model, name, relaxed, relative_gap, iterations, nodes, time_limit_seconds))

    outcome = call(solver)
    if outcome is None and solver == "highs":
        outcome = call("glop" if relaxed else "scip")
    return outcome or Outcome(Status.TIMEOUT, (), float("inf"), -float("inf"))


def most_nodes(model: LinearModel) -> int:
    """Return the nodes of branch and bound after which an integer program of this size ends with the best solution so far."""
    return max(1, _NODE_VARIABLES // max(1, model.variables))


def _interruptible(call: Callable[[], T]) -> T:
    """Run a call in a second thread, so that the main thread receives Ctrl-C at once; the call then runs to its time limit. Short
    calls too: the first Python code that runs after the solver's own is a look-up of a message's class, whose exceptions OR-tools
    drops, an interrupt among them."""
    if current_thread() is not main_thread():
        return call()
    out: Queue[T | BaseException] = Queue()

    def run() -> None:
        try:
            out.put(call())
        except BaseException as error:
            out.put(error)

    Thread(target=run, daemon=True).start()
    result = out.get()
    if isinstance(result, BaseException):
        raise result
    return result


def solve_large(
    model: LinearModel, *, time_limit_seconds: float, relative_gap: float, iterations: float = float("inf"),
    branches: int = _MAX_NODES,
) -> Outcome:  # fmt: skip
    """Minimise as `solve` does, with `most_nodes`. A large model is branched on its `branching_groups` alone: at each node the
    linear relaxation, which is a lower bound, and where it mixes none of these groups, the integer problem without the binaries
    that are zero in the relaxation, which takes a tenth of the time. The bound remains that of the relaxations. No relaxation has
    more than is left of `iterations`; no more than `branches` nodes are looked into. The model is unchanged afterwards."""
    if model.variables < _LARGE_MODEL:
        return solve(model, time_limit_seconds=time_limit_seconds, relative_gap=relative_gap, nodes=most_nodes(model))
    upper = model.upper
    try:
        return _Branching(model, monotonic() + time_limit_seconds, iterations, max(relative_gap, _LARGE_GAP)).run(branches)
    finally:
        model.upper = upper


class _Branching:
    """Branch and bound, best bound first. A node is the set of columns that are fixed at zero (`out`)."""

    def __init__(self, model: LinearModel, end: float, iterations: float, gap: float) -> None:
        self.model, self.end, self.iterations, self.gap = model, end, iterations, gap
        self.used = 0  # iterations
        self.upper = list(model.upper)
        self.best = Outcome(Status.INFEASIBLE, (), float("inf"), float("inf"))
        self.open: list[tuple[float, int, frozenset[int]]] = []
        self.closed: list[float] = []  # bounds of nodes that need no branching

    def run(self, branches: int) -> Outcome:
        self.open.append((-float("inf"), 0, frozenset()))
        rounds = 0
        while self.open and rounds < branches and self.used < self.iterations and monotonic() < self.end:
            bound, _, out = heappop(self.open)
            if self._within_gap(bound):
                self.closed.append(bound)
                break
            rounds += 1
            self._node(out, rounds, bound)
        bound = min([self.best.objective, *self.closed, *(bound for bound, _, _ in self.open)])
        if not self.best.values:
            status = Status.TIMEOUT if self.open or self.closed else Status.INFEASIBLE
            return Outcome(status, (), float("inf"), bound, self.used)
        near = self.best.objective - bound <= self.gap * abs(self.best.objective)
        return Outcome(Status.OPTIMAL if near else Status.FEASIBLE, self.best.values, self.best.objective, bound, self.used)

    def _within_gap(self, bound: float) -> bool:
        return bool(self.best.values) and self.best.objective - bound <= self.gap * abs(self.best.objective)

    def _solve(self, out: Iterable[int], relaxed: bool) -> Outcome:
        self.model.upper = list(self.upper)
        for column in out:
            self.model.upper[column] = 0.0
        left = int(max(1.0, self.iterations - self.used)) if self.iterations < float("inf") else None
        outcome = solve(
            self.model, relaxed=relaxed, time_limit_seconds=self.end - monotonic(), relative_gap=self.gap / 10,
            iterations=left, nodes=most_nodes(self.model),
        )  # fmt: skip
        self.used += outcome.iterations
        return outcome

    def _node(self, out: frozenset[int], number: int, bound: float) -> None:
        """Look into a node, whose parent's relaxation is `bound`."""
        root = self._solve(out, True)
        if root.status is Status.INFEASIBLE:
            return
        if root.status is not Status.OPTIMAL:
            self.closed.append(bound)
            return
        if self._within_gap(root.objective):
            self.closed.append(root.objective)
            return
        if not self.best.values or not self._mixed(root.values):
            unused = [i for i, whole in enumerate(self.model.integer) if whole and root.values[i] < 1e-7]
            outcome = self._solve({*out, *unused}, False)
            self._offer(outcome)
            if not self.best.values:
                self._round(out, root.values)
            if self._within_gap(root.objective):
                self.closed.append(root.objective)
                return
        mixed = self._mixed(root.values)
        if mixed is None:
            if not self.best.values:
                self._dive(out, root.values)
            # with all binaries, where those of the relaxation give no solution
            self.closed.append(root.objective if self.best.values else max(root.objective, self._solve_wholly(out).bound))
            return
        for index, chosen in enumerate(mixed):
            if self.upper[chosen] > 0 and chosen not in out:
                heappush(self.open, (root.objective, 10 * number + index, out | set(mixed) - {chosen}))

    def _round(self, out: frozenset[int], values: Sequence[float]) -> None:
        """Look for a solution whose boundaries have the placements of the largest share in the relaxation: what is left falls
        apart into blocks. Over the strategies that the relaxation uses, else over all; conversions are free, since those of a
        relaxation that mixes two equal axes are halves of which no whole ones can be made."""
        far: set[int] = set()
        for group in self.model.boundary_groups:
            chosen = max(group, key=lambda column: values[column])
            far.update(column for column in group if column != chosen)
        unused = {column for group in self.model.strategy_groups for column in group if values[column] < 1e-7}
        if not self._solve_wholly({*out, *far, *unused}).values:
            self._solve_wholly({*out, *far})

    def _dive(self, out: frozenset[int], values: Sequence[float]) -> None:
        """Look for a solution with the relaxation's choice in every branching group, over all other binaries."""
        self._solve_wholly({*out, *(column for group in self.model.branching_groups for column in group if values[column] < 0.5)})

    def _solve_wholly(self, out: Iterable[int]) -> Outcome:
        outcome = self._solve(out, False)
        self._offer(outcome)
        return outcome

    def _offer(self, outcome: Outcome) -> None:
        if outcome.values and outcome.objective < self.best.objective:
            self.best = outcome

    def _mixed(self, values: Sequence[float]) -> tuple[int, ...] | None:
        """The branching group that is farthest from one choice, None where none is mixed."""
        worst = min(self.model.branching_groups, key=lambda group: max(values[column] for column in group), default=())
        return worst if worst and max(values[column] for column in worst) < 1 - 1e-6 else None
