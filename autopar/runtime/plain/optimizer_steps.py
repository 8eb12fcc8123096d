"""The optimizer steps of each rank between two calls of a model, which all ranks make alike: one that decides by what it has
alone may leave one out that others make."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from ..comm.agreement import gather
from ..compat.hooks import around_optimizer_steps
from ..errors import MismatchProblem
from ..state.materialize import State


class OptimizerSteps:
    """Counts the steps since the last call, of optimizers that have parameters of `state`."""

    def __init__(self, state: State) -> None:
        self.state, self.count = state, 0
        around_optimizer_steps(self, after=OptimizerSteps._add)

    def agree(self, same: bool, describe: Callable[[int], str]) -> None:
        """Raise a MismatchProblem on all ranks where they have not made the `same` number of steps; then count from 0."""
        if not same:
            counts: list[int] = gather(self.count)
            behind, ahead = (counts.index(extreme(counts)) for extreme in (min, max))
            raise MismatchProblem(
                f"{describe(behind)} has made {counts[behind]} optimizer steps since the last call, {describe(ahead)} "
                f"{counts[ahead]}: call optimizer.step() on all ranks or on none, and decide by what all ranks have alike "
                "(p.grad.norm().item(), not a part p.grad.to_local())"
            )
        self.count = 0

    def _add(self, optimizer: Optimizer, *_: object) -> None:
        own = {id(parameter) for parameter in self.state.every_parameter.values()}
        self.count += any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
