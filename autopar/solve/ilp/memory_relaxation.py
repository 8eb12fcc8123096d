"""The linear relaxation of a program under memory, whose bound holds for plans that differ between equal calls too; with cuts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic

from autopar.solve.ilp.formulation import CallBeside, Formulation
from autopar.solve.ilp.linear_model import Outcome, Status, Terms, total
from autopar.solve.ilp.solver import solve

_TOLERANCE = 1e-6
"""The share of a call's seconds that is more than rounding."""


def relax_under_memory(form: Formulation, time_limit_seconds: float, iterations: int | None = None) -> Outcome:
    """Solve the linear relaxation without the events inside of equal calls. The cuts stay in the program, which they hold for."""
    model, end = form.model, monotonic() + time_limit_seconds
    model.upper[form.uneven_excess] = inf
    outcome = solve(model, relaxed=True, time_limit_seconds=time_limit_seconds, iterations=iterations)
    if outcome.status is Status.OPTIMAL and _add_cuts(form, outcome.values, end):
        outcome = solve(model, relaxed=True, time_limit_seconds=end - monotonic(), iterations=iterations)
    model.upper[form.uneven_excess] = 0.0
    return outcome


def _add_cuts(form: Formulation, values: Sequence[float], end: float) -> bool:
    """Add rows where the relaxation hides transfers of one ZeRO stage behind the compute of equal calls in another, while each
    call overlaps the transfers of its own neighbour alone; return whether there are any."""
    least = dict[int, float]()
    found = False
    for call in form.calls_beside:
        for number in range(1, len(call.overlapped)):
            if _value(_overlap_terms(form, call, number, values[call.main]), values) <= values[call.seconds] * (1 + _TOLERANCE):
                continue  # not even by the compute of the relaxation, of which there may be less
            if call.main not in least:
                least[call.main] = _least_value(form, call.main, end - monotonic())
            # t >= overlapped transfers in the stages from this one on, and the least compute, slowed by them, in those before
            form.model.at_least(call.seconds, _overlap_terms(form, call, number, least[call.main]))
            found = True
    return found


def _overlap_terms(form: Formulation, call: CallBeside, number: int, compute: float) -> Terms:
    """Return the transfers beside a call in the ZeRO stages from that of the number on, and its compute in those before."""
    contention, stages = form.problem.cluster.overlap.contention, list(call.overlapped.items())
    computes = (part for z, terms in stages[:number] for part in ((compute, {z: 1.0}), (contention, terms)))
    return total(*computes, *((1.0, terms) for _, terms in stages[number:]))


def _value(terms: Terms, values: Sequence[float]) -> float:
    return sum(factor * values[column] for column, factor in terms.items())


def _least_value(form: Formulation, column: int, time_limit_seconds: float) -> float:
    """Return a lower bound of a column in all plans, whether they fit or not."""
    model, cost = form.model, form.model.cost
    model.cost, model.upper[form.excess] = [0.0] * model.variables, inf
    model.cost[column] = 1.0
    outcome = solve(model, relaxed=True, time_limit_seconds=time_limit_seconds)
    model.cost, model.upper[form.excess] = cost, 0.0
    return outcome.bound if outcome.status is Status.OPTIMAL else 0.0
