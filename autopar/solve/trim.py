"""What a plan sends to the host without need: the solver is indifferent where transfers hide behind the computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.evaluate import Evaluation
from autopar.ir.plan import Candidate

Price = Callable[[Candidate], Evaluation]


def stay(candidate: Candidate, found: Evaluation, price: Price) -> tuple[Candidate, Evaluation]:
    """The plan with tensors left on the device one after another, as long as it fits and takes no longer."""
    for number, plan in enumerate(candidate.blocks):
        for state in plan.offload:
            blocks = list(candidate.blocks)
            blocks[number] = replace(blocks[number], offload=tuple(each for each in blocks[number].offload if each != state))
            other = replace(candidate, blocks=tuple(blocks))
            priced = price(other)
            if priced.fits and priced.step_seconds <= found.step_seconds:
                candidate, found = other, priced
    return candidate, found
