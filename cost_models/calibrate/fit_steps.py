"""The shares of a cluster's figures that explain measured steps best: what ``autopar tune`` learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log

from autopar.cost_models.calibrate.fit import descend
from autopar.cost_models.hardware.cluster import Cluster, with_tuned_rates
from autopar.cost_models.hardware.stack_entries import TunedRates
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate

_NOISE, _PRIOR = 0.03, 0.5
"""Standard deviations, in logarithms: of a measured step, and of shares before anything was run. Plans that differ in nothing but
compute say little of the network, which then stays as it was."""
_MOST = 4.0


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
    """Return the shares of least squares of the logarithms of predicted over measured seconds."""

    def loss(shares: Mapping[str, float]) -> float:
        off = sum((log(each.ratio(TunedRates(**shares))) / _NOISE) ** 2 for each in steps)
        return off + sum((log(share) / _PRIOR) ** 2 for share in shares.values())

    start = asdict(TunedRates())
    return TunedRates(**descend(loss, start, dict.fromkeys(start, (1 / _MOST, _MOST))))
