"""Configurations that somebody knows to be good, as candidates of the search: priced on the model itself with our programs'
constants, so that a plan is never predicted to be slower than them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.result import PlanResult
from autopar.solve.space.options import SearchOptions


def may_seed(options: SearchOptions) -> bool:
    """Return whether nothing is forced: seeds obey nothing."""
    fixed = options.force or options.schedule or options.pins or options.stored or options.placed
    return not fixed and not options.precision.offload_optimizer


def with_seeds(options: SearchOptions, result: PlanResult, seeds: Iterable[PlanResult]) -> PlanResult:
    """Return `result`, or the fastest of `seeds` where that fits and is predicted to be faster; those that fit are among the
    alternatives. Seeds are priced configurations (`candidate.price_configuration`) of the same model, batch and cluster.
    Unchanged where anything is forced: seeds obey nothing."""
    if not may_seed(options):
        return result
    priced = [each for each in seeds if each.evaluation.fits]
    if not priced:
        return result
    result = replace(result, alternatives=(*result.alternatives, *(solution for each in priced for solution in each.solutions)))
    best = min(priced, key=lambda each: each.evaluation.step_seconds)
    if best.evaluation.step_seconds >= result.evaluation.step_seconds:
        return result
    return result.with_plan(best.graph, PricedPlan(best.candidate, best.evaluation))
