"""Lower bounds on the seconds of every plan of a mesh, cheap ones first. They prune, and the certificate is made of them.

They hold for every point of the mesh: a step takes at least what its calls compute and what their conversions and collectives
send, since only the communication of state overlaps them; memory, state, stalls and redundancy only add to that. And a batch in
one go is never slower than in k micro-batches, ``seconds(k x batch) <= k x seconds(batch)`` for every price, so the bound of the
least number of micro-batches holds for its multiples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from autopar.solve.ilp.formulate import formulate_flows
from autopar.solve.ilp.linear_model import Status, add
from autopar.solve.ilp.solver import solve
from autopar.solve.problem.problem import Problem


def operation_bound(problem: Problem) -> float:
    """Every operation by its fastest strategy, without conversions and without communication of state."""
    return sum(_block_seconds(problem, name) for name in problem.blocks)


def _block_seconds(problem: Problem, name: str) -> float:
    return problem.micro_batches * problem.graph.count(name) * problem.blocks[name].least_seconds


def has_many_blocks(problem: Problem) -> bool:
    """Return whether no block is most of the problem, so that programs of single blocks are much smaller than one of all."""
    sizes = [len(table.block.nodes) for table in problem.blocks.values()]
    return 2 * max(sizes) <= sum(sizes)


def bound_by_blocks(
    problem: Problem,
    is_enough: Callable[[float], bool],
    seconds_left: Callable[[], float],
    known: dict[str, float] | None = None,
) -> float:
    """The linear relaxation of each distinct block by itself, as if the others took whatever placements suit it, times the number
    of its calls; `operation_bound` of blocks that need not be looked at, because the sum `is_enough`. Those that compute most
    come first. `known` collects the seconds of those that were relaxed."""
    known = {} if known is None else known
    least = {name: _block_seconds(problem, name) for name in problem.blocks}
    seconds = {**least, **known}
    for name in sorted(least, key=lambda name: -least[name]):
        if is_enough(sum(seconds.values())) or seconds_left() <= 0:
            break
        if name not in known:
            known[name] = max(least[name], FlowRelaxation(problem, (name,)).bound(seconds_left()))
            seconds[name] = known[name]
    return sum(seconds.values())


def ideal_seconds(problem: Problem) -> float:
    """All FLOPs of a step at the peak rate of all devices: below every plan on every mesh."""
    flops = sum(problem.graph.count(name) * table.flops for name, table in problem.blocks.items())
    device = problem.cluster.device
    peak = max(map(device.peak_flops_per_second, (problem.precision.compute, "bfloat16", "float8")))
    return problem.micro_batches * flops / (problem.cluster.size * peak)


class FlowRelaxation:
    """The linear relaxation of strategies and conversion flows, without memory and state. `main`: seconds of the calls. Of some
    `blocks` only: as `formulate_flows`."""

    def __init__(self, problem: Problem, blocks: Collection[str] | None = None) -> None:
        self.problem, self.blocks = problem, problem.blocks.keys() if blocks is None else blocks
        self.form = formulate_flows(problem, blocks)
        self.main: dict[int, float] = {}
        for name in self.blocks:
            count = float(problem.graph.count(name) * problem.micro_batches) / self.form.second_unit
            for column, seconds, _ in self.form.priced_columns(name):
                add(self.main, {column: count * (seconds.forward + seconds.backward)})

    def bound(self, time_limit_seconds: float) -> float:
        """Return a bound below the seconds of the calls in every plan. `operation_bound` where time ends first."""
        model = self.form.model
        model.cost = [0.0] * model.variables
        model.minimise(self.main)
        outcome = solve(model, relaxed=True, time_limit_seconds=time_limit_seconds)
        least = sum(_block_seconds(self.problem, name) for name in self.blocks)
        return max(least, outcome.bound * self.form.second_unit) if outcome.status is Status.OPTIMAL else least
