"""Removes needless offloading and partition from a plan: where copies overlap the computation, the solver is indifferent to
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.step.evaluate import Evaluation
from autopar.ir.plan import BlockPlan, Candidate

Price = Callable[[Candidate], Evaluation]


def trim_offload(candidate: Candidate, evaluation: Evaluation, price: Price) -> tuple[Candidate, Evaluation]:
    """The plan with one tensor after another that is offloaded, or in parts, saved whole on the device instead, where it still
    fits and takes no longer."""
    for number, plan in enumerate(candidate.blocks):
        for value in (*plan.offload, *plan.partition_saved):
            blocks = list(candidate.blocks)
            blocks[number] = _without(blocks[number], value)
            other = replace(candidate, blocks=tuple(blocks))
            priced = price(other)
            if priced.fits and priced.step_seconds <= evaluation.step_seconds:
                candidate, evaluation = other, priced
    return candidate, evaluation


def _without(plan: BlockPlan, value: object) -> BlockPlan:
    return replace(
        plan,
        offload=tuple(each for each in plan.offload if each != value),
        partition_saved=tuple(each for each in plan.partition_saved if each != value),
    )
