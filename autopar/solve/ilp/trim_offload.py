"""Removes needless offloading from a plan: where copies overlap the computation, the solver is indifferent to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.step.evaluate import Evaluation
from autopar.ir.plan import Candidate

Price = Callable[[Candidate], Evaluation]


def trim_offload(candidate: Candidate, evaluation: Evaluation, price: Price) -> tuple[Candidate, Evaluation]:
    """The plan with one offloaded tensor after another saved on the device instead, where it still fits and takes no longer."""
    for number, plan in enumerate(candidate.blocks):
        for value in plan.offload:
            blocks = list(candidate.blocks)
            blocks[number] = replace(blocks[number], offload=tuple(each for each in blocks[number].offload if each != value))
            other = replace(candidate, blocks=tuple(blocks))
            priced = price(other)
            if priced.fits and priced.step_seconds <= evaluation.step_seconds:
                candidate, evaluation = other, priced
    return candidate, evaluation
