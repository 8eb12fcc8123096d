"""The shares of a cluster's figures that explain measured steps best: what ``autopar tune`` learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

from autopar.cost_models.hardware.cluster import Cluster, with_tuned_rates
from autopar.cost_models.hardware.tuned_rates import TunedRates
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate

_NOISE, _PRIOR = 0.03, 0.5
"""Standard deviations, in logarithms: of a measured step, and of shares before anything was run. Plans that differ in nothing but
compute say little of the network, which then stays as it was."""
_FIRST, _LAST = 0.2, 0.005
_MOST = log(4.0)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A plan that ran, the cluster that it was priced on, and the seconds of its step."""

    graph: Graph
    candidate: Candidate
    cluster: Cluster
    optimizer: str
    seconds: float

    def ratio(self, rates: TunedRates) -> float:
        """Return predicted over measured seconds at these shares."""
        cluster = with_tuned_rates(self.cluster, rates)
        return evaluate(self.graph, self.candidate, cluster, self.optimizer).step_seconds / self.seconds


def fit_steps(steps: Sequence[MeasuredStep]) -> TunedRates:
    """Return the shares of least squares of the logarithms of predicted over measured seconds, found by a pattern search."""

    def loss(point: tuple[float, float]) -> float:
        rates = TunedRates(*map(exp, point))
        return sum((log(each.ratio(rates)) / _NOISE) ** 2 for each in steps) + sum((x / _PRIOR) ** 2 for x in point)

    return TunedRates(*map(exp, _least(loss, (0.0, 0.0))))


def _least(loss: Callable[[tuple[float, float]], float], start: tuple[float, float]) -> tuple[float, float]:
    best, least, width = start, loss(start), _FIRST
    while width >= _LAST:
        near = [(best[0] + x * width, best[1] + y * width) for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))]
        found = min(((loss(point), point) for point in near if max(map(abs, point)) <= _MOST), default=(least, best))
        if found[0] < least:
            least, best = found
        else:
            width /= 2
    return best
