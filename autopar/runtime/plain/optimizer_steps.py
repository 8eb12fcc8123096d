"""The optimizer steps of each rank between two calls of a model, which all ranks make alike: a stage of a pipeline that decides
by its own gradients may leave one out that others make."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

from torch.optim import Optimizer

from ..comm.agreement import gather
from ..compat.hooks import around_optimizer_steps
from ..errors import MismatchProblem
from ..state.materialize import State


class StepBounds(NamedTuple):
    """The number of steps that a rank has made with parameters of this model, and the number that it may have made: where a stage
    has none of the parameters that an optimizer trains, that has no elements, and may be of any model."""

    least: int
    most: int


class OptimizerSteps:
    """Counts the steps since the last call, of optimizers that have parameters of `state`."""

    def __init__(self, state: State) -> None:
        self.state, self.own, self.empty, self.compared = state, 0, 0, True
        around_optimizer_steps(self, after=OptimizerSteps._count)

    def bounds(self) -> StepBounds:
        """Return those of this rank."""
        return StepBounds(self.own, self.own + self.empty) if self.compared else StepBounds(0, 0)

    def agree(self, ranks: StepBounds, describe: Callable[[int], str]) -> None:
        """Raise a MismatchProblem on all ranks where they have made different numbers of steps; then count from 0. `ranks`: the
        largest `least` and the smallest `most` of all ranks, which all call this."""
        if ranks.least > ranks.most:
            own: list[tuple[int, int, int]] = gather((*self.bounds(), self._optimizers()))
            behind = min(range(len(own)), key=lambda rank: own[rank][1])
            ahead = max(range(len(own)), key=lambda rank: own[rank][0])
            if own[behind][2] >= own[ahead][2]:
                raise MismatchProblem(
                    f"{describe(behind)} has made {own[behind][0]} optimizer steps since the last call, {describe(ahead)} "
                    f"{own[ahead][0]}: call optimizer.step() on all ranks or on none, and decide by what is of all stages: "
                    'parallel.clip_grad_norm_(float("inf")), or torch.stack([g.isnan().any() for g in gradients]).any()'
                )
            # a script that makes an optimizer for each parameter has more on one stage than on another, and as many steps
            self.compared = False
        self.own = self.empty = 0

    def _count(self, optimizer: Optimizer, *_: object) -> None:
        self.own += self._owns(optimizer)
        self.empty += self._may_own(optimizer)

    def _owns(self, optimizer: Optimizer) -> bool:
        own = {id(parameter) for parameter in self.state.parameters.values()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _may_own(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has no elements at all."""
        return not any(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])

    def _optimizers(self) -> int:
        """The number of optimizers that are, or may be, of this model."""
        optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer) and hasattr(each, "param_groups")]
        return sum(self._owns(each) or self._may_own(each) for each in optimizers)
