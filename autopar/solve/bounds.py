"""Seconds below every plan of a mesh, cheap ones first. They prune, and they are what the certificate is made of.

Sound for every point of the mesh: a plan's step is at least what its calls compute and what its conversions send, since
only transfers of state can hide behind them; memory, state, waiting and repetition only add to that. And a batch in one go is
never slower than in k parts, ``seconds(k x batch) <= k x seconds(batch)`` for every price, so the bound of the least number of
micro-batches holds for its multiples.
"""

from __future__ import annotations

from autopar.solve import ilp
from autopar.solve.formulate import flows
from autopar.solve.ilp import Status
from autopar.solve.linear import total
from autopar.solve.problem import Problem, Seconds


def work_bound(problem: Problem) -> float:
    """Each operation by its fastest strategy, nothing converted, nothing gathered."""
    return problem.micro_batches * sum(
        problem.graph.count(name) * min(choice.seconds.forward + choice.seconds.backward for choice in choices)
        for name, table in problem.blocks.items()
        for choices in table.choices.values()
    )


def ideal_seconds(problem: Problem) -> float:
    """All arithmetic of a step at the highest rate of all devices: below every plan on every mesh."""
    flops = sum(problem.graph.count(name) * table.flops for name, table in problem.blocks.items())
    device = problem.cluster.device
    peak = max(map(device.peak_flops_per_second, (problem.precision.compute, "bfloat16", "float8")))
    return problem.micro_batches * flops / (problem.cluster.size * peak)


class Flow:
    """The linear relaxation of strategies and placement flows, without memory and state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.made = flows(problem)
        self.main: dict[int, float] = {}
        self.shared: dict[int, float] = {}
        for name, table in problem.blocks.items():
            count = float(problem.graph.count(name) * problem.micro_batches) / self.made.second_unit
            for node, choices in table.choices.items():
                for choice, x in zip(choices, self.made.x[name, node], strict=True):
                    self._spend(x, choice.seconds, count)
            for value, moves in table.moves.items():
                for step, y in zip(moves.steps, self.made.y[name, value], strict=True):
                    self._spend(y, step.seconds, count)

    def _spend(self, variable: int, seconds: Seconds, count: float) -> None:
        self.main[variable] = self.main.get(variable, 0.0) + count * (seconds.forward + seconds.backward)
        shared = seconds.forward_shared + seconds.backward_shared
        if shared:
            self.shared[variable] = self.shared.get(variable, 0.0) + count * shared

    def bound(self, time_limit_seconds: float, weight: float = 1.0) -> float:
        """Below ``weight x main + (1 - weight) x shared`` of every plan: seconds of the calls, and seconds that their collectives
        occupy a link of the data axis. Where time ends first: what operations take by themselves."""
        model = self.made.model
        model.cost = [0.0] * model.variables
        model.minimise(total((weight, self.main), (1 - weight, self.shared)))
        outcome = ilp.solve(model, relaxed=True, time_limit_seconds=time_limit_seconds)
        least = weight * work_bound(self.problem)
        return max(least, outcome.bound * self.made.second_unit) if outcome.status is Status.OPTIMAL else least
