"""The work of a script on each rank between two calls of a model, which all ranks do alike. A rank that decides by what it has
alone may leave out an optimizer step, or take another learning rate; one that reads a value of a pipeline's stages alone is given
the next one that the others read."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from ..comm.agreement import gather
from ..compat.hooks import around_optimizer_steps
from ..errors import MismatchProblem
from ..state.model_state import State
from ..state.stage_tensors import StageReads, stage_reads

Options = dict[str, float]
"""The numbers among the options of a group by name."""


class ScriptWork:
    """The work since the last call: the steps of optimizers that have parameters of `state`, of each the options of its groups,
    and the reads of values of stages."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.steps: list[list[Options]] = []
        around_optimizer_steps(self, after=ScriptWork._add)

    @property
    def record(self) -> tuple[tuple[int, int], list[list[Options]]]:
        """The reads, and the steps."""
        reads = StageReads() if self.state.pipeline is None else stage_reads()
        return (reads.number, reads.checksum), self.steps

    def agree(self, same: bool, describe: Callable[[int], str]) -> None:
        """Raise a MismatchProblem on all ranks where they have not the `same` record; begin again."""
        own = self.record
        if self.state.pipeline is not None:
            stage_reads().clear()
        records: list[tuple[tuple[int, int], list[list[Options]]]] = [] if same else gather(own)
        reads, every = [each for each, _ in records], [each for _, each in records]
        if odd := next((rank for rank, each in enumerate(reads) if each != reads[0]), 0):
            one, other = reads[0][0], reads[odd][0]
            raise MismatchProblem(
                f"{describe(0)} has made {one} reads of values of the pipeline's stages since the last call, {describe(odd)} "
                f"{other if one != other else 'others'}, and a rank may have had one value for another: read the same values on "
                "all ranks (take p.grad.norm().item() out of `if rank == 0:`)"
            )
        if counts := list(map(len, every)):
            behind, ahead = (counts.index(extreme(counts)) for extreme in (min, max))
            if counts[behind] < counts[ahead]:
                raise MismatchProblem(
                    f"{describe(behind)} has made {counts[behind]} optimizer steps since the last call, {describe(ahead)} "
                    f"{counts[ahead]}: call optimizer.step() on all ranks or on none, and decide by what all ranks have alike "
                    "(p.grad.norm().item(), not a part p.grad.to_local())"
                )
            odd = next(rank for rank, each in enumerate(every) if each != every[0])
            first, second = _by_words(every[0]), _by_words(every[odd])
            name = next((name for name in first if first[name] != second.get(name)), "groups")
            raise MismatchProblem(
                f"{describe(0)} has made an optimizer step with {name} = {first.get(name)}, {describe(odd)} with "
                f"{second.get(name)}: give it the same value on all ranks (ReduceLROnPlateau: step by a loss that all ranks have)"
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
