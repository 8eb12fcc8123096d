"""The fastest configurations of a space that fit: ordered by the least that each can take, priced by the evaluator until none
that is left can be faster. Limits are counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from autopar.errors import AutoparError
from autopar.software.configuration import Configuration
from autopar.software.pricer import Least, PricedConfiguration, Pricer

FEW = 7
"""So many configurations of a recipe beside a plan are evaluated at most, three times as many while none of them fits (logits of
models with few layers and many words are not in the least); then `_LEAST` that need least memory."""
MANY = 60
"""So many of a software's configurations are evaluated at most where it is what is asked for."""
_LEAST = 2
_HOPE = 0.93
"""What a class of configurations that none was evaluated of may turn out to take, beside the others."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Priced configurations, those that fit first, the fastest of them first. `counted`: all of the space; `left`: those that
    were neither evaluated nor are known to be slower or too large."""

    priced: tuple[PricedConfiguration, ...]
    counted: int
    left: int

    @property
    def best(self) -> PricedConfiguration | None:
        """The fastest that fits, or the one that lacks least memory; None where there is none at all."""
        return self.priced[0] if self.priced else None


def rank(pricer: Pricer, configurations: Iterable[Configuration], most: int = FEW, below: float = inf) -> Ranking:
    """Return the ranking. `below`: nothing slower is looked for, and nothing that does not fit."""
    every = []
    for each in dict.fromkeys(configurations):
        try:
            every.append((pricer.least(each), each))
        except AutoparError:
            continue
    device = pricer.work.cluster.device
    corrections = _Corrections()
    left = [(least, each) for least, each in every if least.bytes <= device.memory_bytes]
    priced: list[PricedConfiguration] = []
    for number in range(3 * most):
        reached = min((each.evaluation.step_seconds for each in priced if each.fits), default=below)
        left = [pair for pair in left if pair[0].seconds < reached and corrections.may_fit(pair[1], pair[0], device.memory_bytes)]
        # every second one by its bound alone: a kind has members that are off by less than those that were evaluated
        likely = most <= FEW or number % 2 == 0
        chosen = min(left, key=lambda pair: corrections.seconds(pair[1], pair[0]) if likely else pair[0].seconds, default=None)
        if chosen is None or (number >= most and reached < inf):
            break
        if most <= FEW and corrections.seconds(chosen[1], chosen[0]) >= reached:
            break
        left.remove(chosen)
        found = _price(pricer, chosen[1])
        if found is not None:
            priced.append(found)
            corrections.learn(chosen[1], chosen[0], found)
    if below == inf and not any(each.fits for each in priced):
        least_memory = sorted(every, key=lambda pair: pair[0].bytes)[:_LEAST]
        priced += filter(None, (_price(pricer, each) for _, each in least_memory))
    return Ranking(tuple(sorted(priced, key=order_of)), len(every), len(left))


def _price(pricer: Pricer, configuration: Configuration) -> PricedConfiguration | None:
    try:
        return pricer.price(configuration)
    except AutoparError:
        return None


def order_of(each: PricedConfiguration) -> tuple[bool, float]:
    """The place in a ranking: what fits by time, then what does not by memory."""
    return not each.fits, each.evaluation.step_seconds if each.fits else each.needed_bytes


@dataclass(slots=True)
class _Corrections:
    """How much more than the least the configurations took that were evaluated so far, by kind: of one kind it is alike."""

    _seconds: dict[object, float] = field(default_factory=dict)
    _bytes: dict[object, tuple[float, float]] = field(default_factory=dict)

    def learn(self, configuration: Configuration, least: Least, found: PricedConfiguration) -> None:
        """Note what an evaluation says of the others of its kind."""
        kind = _kind(configuration)
        self._seconds[kind] = min(found.evaluation.step_seconds / least.seconds, self._seconds.get(kind, inf))
        key = kind, configuration.micro
        ratio, more = self._bytes.get(key, (inf, inf))
        self._bytes[key] = min(found.needed_bytes / least.bytes, ratio), min(found.needed_bytes - least.bytes, more)

    def seconds(self, configuration: Configuration, least: Least) -> float:
        """The likely seconds; of a kind that nothing was evaluated of yet, hopefully."""
        return least.seconds * self._seconds.get(_kind(configuration), _HOPE * min(self._seconds.values(), default=1.0))

    def may_fit(self, configuration: Configuration, least: Least, capacity: float) -> bool:
        """Whether it is likely to fit, as those of its kind with as large micro-batches did: what a stage holds beside state and
        saved tensors grows with these, and not with how much is saved."""
        ratio, more = self._bytes.get((_kind(configuration), configuration.micro), (1.0, 0.0))
        return min(least.bytes * ratio, least.bytes + more) <= capacity


def _kind(each: Configuration) -> object:
    parts = each.context > 1, each.stages > 1, each.virtual > 1, each.experts > 1, each.offload
    return each.tensor, parts, each.recompute, each.zero == 3, each.group > 0
