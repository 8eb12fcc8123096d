"""The optimizer steps of each rank between two calls of a model, which all ranks make alike, with the same options: one that
decides by what it has alone may leave one out that others make, or take another learning rate."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from ..comm.agreement import gather
from ..compat.hooks import around_optimizer_steps
from ..errors import MismatchProblem
from ..state.model_state import State

Options = dict[str, float]
"""The numbers among the options of a group by name."""


class OptimizerSteps:
    """The steps since the last call of optimizers that have parameters of `state`: of each the options of its groups."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.steps: list[list[Options]] = []
        around_optimizer_steps(self, after=OptimizerSteps._add)

    def agree(self, same: bool, describe: Callable[[int], str]) -> None:
        """Raise a MismatchProblem on all ranks where they have not made the `same` steps; then begin again."""
        every: list[list[list[Options]]] = [] if same else gather(self.steps)
        if counts := list(map(len, every)):
            behind, ahead = (counts.index(extreme(counts)) for extreme in (min, max))
            if counts[behind] < counts[ahead]:
                raise MismatchProblem(
                    f"{describe(behind)} has made {counts[behind]} optimizer steps since the last call, {describe(ahead)} "
                    f"{counts[ahead]}: call optimizer.step() on all ranks or on none, and decide by what all ranks have alike "
                    "(p.grad.norm().item(), not a part p.grad.to_local())"
                )
            other = next(rank for rank, each in enumerate(every) if each != every[0])
            one, two = _by_words(every[0]), _by_words(every[other])
            name = next((name for name in one if one[name] != two.get(name)), "groups")
            raise MismatchProblem(
                f"{describe(0)} has made an optimizer step with {name} = {one.get(name)}, {describe(other)} with "
                f"{two.get(name)}: give it the same value on all ranks (ReduceLROnPlateau: step by a loss that all ranks have)"
            )
        self.steps = []

    def _add(self, optimizer: Optimizer, *_: object) -> None:
        ids = {id(parameter) for parameter in self.state.every_parameter.values()}
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
            groups = optimizer.param_groups
            self.steps.append([{key: each for key, each in own.items() if isinstance(each, (int, float))} for own in groups])


def _by_words(steps: list[list[Options]]) -> Options:
    """Return the options of all groups by their words; of equal ones those of the last step."""
    groups = [(at, options) for step in steps for at, options in enumerate(step)]
    return {f"{name} of group {at}": value for at, options in groups for name, value in options.items()}
