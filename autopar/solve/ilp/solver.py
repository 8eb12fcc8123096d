"""Solvers of a `LinearModel`: HiGHS, with SCIP (GLOP for relaxations) as fallback and cross-check; large ones over what their
linear relaxation uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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

_UNUSED_SHARE = 1e-7
"""The share of a binary in a linear relaxation below which that does without it."""

_NODE_VARIABLES = 300_000
"""Nodes of an integer program times its variables at most: some seconds, whatever its size."""


def solve(
    model: LinearModel,
    *,
    solver: SolverName = "highs",
    time_limit_seconds: float | None = None,
    relative_gap: float = 1e-6,
    relaxed: bool = False,
    nodes: int | None = None,
) -> Outcome:
    """Minimise the objective of a model. `relaxed` drops integrality: the root LP. Limits: see `call_solver`."""

    def call(name: SolverName) -> Outcome | None:
        return _interruptible(partial(call_solver, model, name, relaxed, relative_gap, nodes, time_limit_seconds))

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


def solve_large(model: LinearModel, *, time_limit_seconds: float, relative_gap: float) -> Outcome:
    """Minimise as `solve` does, with `most_nodes`. Of a large model first the linear relaxation, which is the bound; then the
    integer program without the binaries that are zero in it, which takes a tenth of the time and comes near the best; where that
    has no solution, programs with more and more of them. The model is unchanged afterwards."""
    if model.variables < _LARGE_MODEL:
        return solve(model, time_limit_seconds=time_limit_seconds, relative_gap=relative_gap, nodes=most_nodes(model))
    end, gap = monotonic() + time_limit_seconds, max(relative_gap, _LARGE_GAP)
    root = solve(model, relaxed=True, time_limit_seconds=time_limit_seconds)
    if root.status is not Status.OPTIMAL:
        return replace(root, values=(), objective=float("inf"))
    upper = model.upper
    try:
        for out in _columns_left_out(model, root.values):
            model.upper = [0.0 if column in out else most for column, most in enumerate(upper)]
            left = end - monotonic()
            best = solve(model, time_limit_seconds=left, relative_gap=gap / 10, nodes=most_nodes(model))
            if best.values or left <= 0:
                break
    finally:
        model.upper = upper
    bound = max(root.objective, best.bound) if not out else root.objective
    if not best.values:
        return replace(best, status=best.status if not out else Status.TIMEOUT, bound=bound)
    near = best.objective - bound <= gap * abs(best.objective)
    return replace(best, status=Status.OPTIMAL if near else Status.FEASIBLE, bound=min(bound, best.objective))


def _columns_left_out(model: LinearModel, values: Sequence[float]) -> Iterator[set[int]]:
    """Yield fewer and fewer columns that are zero in a solution, by the `values` of the linear relaxation.

    First all binaries that it does without. Then boundaries have the placements of its largest shares, so that what is left falls
    apart into blocks, over the strategies that it uses or over all; conversions are free, since those of a relaxation that mixes
    two equal axes are halves of which no whole ones can be made. Then blocks have the ZeRO stage of its largest share, and at the
    end none is left out."""
    yield {column for column, whole in enumerate(model.integer) if whole and values[column] < _UNUSED_SHARE}
    far = _without_largest(model.boundary_groups, values)
    yield far | {column for group in model.strategy_groups for column in group if values[column] < _UNUSED_SHARE}
    yield far
    yield _without_largest(model.zero_groups, values)
    yield set()


def _without_largest(groups: Iterable[Sequence[int]], values: Sequence[float]) -> set[int]:
    """Return the columns of one-hot groups but for the one of each with the largest share."""
    return {column for group in groups for column in set(group) - {max(group, key=values.__getitem__)}}
