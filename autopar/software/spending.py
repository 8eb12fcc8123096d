"""Time and money of a training run on several clusters: for each the best software and configuration, intervals from the errors
of published runs, and the one measurement that would narrow the answer most.

How far off predictions are says what share of the published runs would fit with such a prediction, and within which interval
steps lie. ``data/residuals.json`` is drawn from the table that planning does not read (``python
tests/benchmarks/store_measured_runs.py --residuals`` writes it, and a test compares).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.software.choose import Choice, choose
from autopar.software.models import Model
from autopar.software.record import Software

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A cluster, and the price of one of its devices for an hour."""

    name: str
    cluster: Cluster
    price: float


@dataclass(frozen=True, slots=True)
class Spending:
    """A run on an offer with the software that takes least time there. The pairs are intervals."""

    offer: Offer
    choice: Choice
    hours: float
    hours_interval: tuple[float, float]
    tokens_per_second: float
    problem: str = ""

    @property
    def cost(self) -> float:
        """The money of the whole run."""
        return self.hours * self.rate

    @property
    def cost_interval(self) -> tuple[float, float]:
        """Its interval."""
        low, high = self.hours_interval
        return low * self.rate, high * self.rate

    @property
    def rate(self) -> float:
        """Money of an hour."""
        return self.offer.price * self.offer.cluster.size

    @property
    def tokens_per_money(self) -> float:
        """Tokens for a unit of money."""
        return self.tokens_per_second * _HOUR / self.rate


def offer_of(text: str) -> Offer:
    """``dgx-h100:16@2.5``. AutoparError where a part is missing."""
    name, mark, price = text.rpartition("@")
    try:
        value = float(price)
    except ValueError:
        value = 0.0
    if not mark or not 0 < value < 1e9:
        raise AutoparError(
            f"{text[:60]!r} has no price: write a cluster and the price of a device for an hour, as dgx-h100:16@2.5"
        )
    return Offer(name, Cluster.parse(name), value)


def spending_of(
    model: Model, offer: Offer, software: Sequence[Software], tokens: float, batch: int, precision: str
) -> list[Spending]:
    """The run on one offer with each software that can do it, the fastest first; a software that cannot is left out. AutoparError
    for a model without tokens."""
    if not model.seq:
        raise AutoparError(f"{model.name} has no sequence of tokens to count: say --seq N, tokens of an example")
    out = []
    for each in software:
        try:
            found = choose(each, model, offer.cluster, batch, precision, most=20)
        except AutoparError:
            continue
        best = found.ranking.best
        assert best is not None
        steps = tokens / (batch * model.seq)
        mixture = model.decoder is not None and bool(model.decoder.sizes.experts)
        low, high = step_interval(best.evaluation.step_seconds, mixture)
        seconds = best.evaluation.step_seconds
        out.append(
            Spending(
                offer, found, steps * seconds / _HOUR, (steps * low / _HOUR, steps * high / _HOUR), batch * model.seq / seconds
            )
        )
    return sorted(out, key=lambda each: each.hours)


def measurement(found: Sequence[Spending]) -> str:
    """The one measurement that would narrow which is cheapest most: of the runs whose intervals of cost reach below the cheapest
    one's upper end, the one with the widest interval. Empty where nothing else is in question."""
    if len(found) < 2:
        return ""
    cheapest = min(found, key=lambda each: each.cost)
    rivals = [each for each in found if each is not cheapest and each.cost_interval[0] < cheapest.cost_interval[1]]
    if not rivals:
        return ""
    widest = max([cheapest, *rivals], key=lambda each: each.cost_interval[1] - each.cost_interval[0])
    best = widest.choice.ranking.best
    assert best is not None
    words, (low, high) = best.configuration.describe(widest.choice.work), widest.cost_interval
    return (
        f"the step of {widest.choice.software.name} on {widest.offer.name} ({words}; {best.evaluation.step_seconds:.4g} s): "
        f"its cost is known to {high - low:,.0f}"
    )


Residuals = Sequence[tuple[str, float]]
"""(source, ``measured / predicted - 1``) of runs."""
_OUTER = 0.1
"""The share of the weight that is left out on each side of an interval."""


@lru_cache(maxsize=1)
def stored_residuals() -> dict[str, Residuals]:
    """Residuals of ``memory``, and of steps of ``dense`` models and ``mixtures``."""
    text = (files("autopar.software") / "data" / "residuals.json").read_text(encoding="utf-8")
    return {kind: [(source, float(value)) for source, value in pairs] for kind, pairs in json.loads(text).items()}


def quantile(residuals: Residuals, share: float) -> float:
    """The least residual below which `share` of the weight lies; every source has the same weight, whatever its runs."""
    runs = Counter(source for source, _ in residuals)
    below = 0.0
    for source, residual in sorted(residuals, key=lambda pair: pair[1]):
        below += 1 / (runs[source] * len(runs))
        if below >= share:
            return residual
    return max((residual for _, residual in residuals), default=0.0)


def fitting_share(predicted_bytes: float, capacity_bytes: float) -> float:
    """The share of the runs that would fit, if they were predicted to take so much."""
    residuals = stored_residuals()["memory"]
    runs = Counter(source for source, _ in residuals)
    return sum(1 / (runs[source] * len(runs)) for source, each in residuals if predicted_bytes * (1 + each) <= capacity_bytes)


def step_interval(predicted_seconds: float, mixture: bool) -> tuple[float, float]:
    """The interval in which eight of ten measured steps lie."""
    residuals = stored_residuals()["mixtures" if mixture else "dense"]
    return tuple(predicted_seconds * (1 + quantile(residuals, share)) for share in (_OUTER, 1 - _OUTER))  # type: ignore[return-value]
