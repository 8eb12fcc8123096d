"""The choice of a software's settings: the ranking of its configurations for a model on a cluster, and the files that set the
best. The fastest configurations of a space that fit are found in the order of the least that each can take, priced by the
evaluator until none that is left can be faster. Limits are counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.errors import AutoparError, Infeasible
from autopar.software.configuration import Configuration, Workload
from autopar.software.files.text import text_of
from autopar.software.models import Model, workload_of
from autopar.software.pricer import Least, PricedConfiguration, Pricer
from autopar.software.record import Job, Software

FEW = 7
"""So many configurations of a recipe beside a plan are evaluated at most, three times as many while none of them fits (logits of
models with few layers and many words are not in the least); then `_LEAST` that need least memory."""
MANY = 60
"""So many of a software's configurations are evaluated at most where it is what is asked for."""
_LEAST = 2
_HOPE = 0.93
"""The ratio of evaluated to least seconds of a class of which no configuration was evaluated, over the smallest of the others."""


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
        """Return whether it is likely to fit, as those of its kind with as large micro-batches did: what a stage holds beside
        state and saved tensors grows with these, and not with how much is saved."""
        ratio, more = self._bytes.get((_kind(configuration), configuration.micro), (1.0, 0.0))
        return min(least.bytes * ratio, least.bytes + more) <= capacity


def _kind(each: Configuration) -> object:
    parts = each.context > 1, each.stages > 1, each.virtual > 1, each.experts > 1, each.offload
    return each.tensor, parts, each.recompute, each.zero == 3, each.group > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The ranking of one software, the workload that it is for, and the job without a configuration."""

    software: Software
    work: Workload
    job: Job
    ranking: Ranking
    pricer: Pricer

    def job_of(self, priced: PricedConfiguration) -> Job:
        """The job that a configuration of the ranking is."""
        return replace(self.job, configuration=priced.configuration)


def choose(
    software: Software,
    model: Model,
    cluster: Cluster,
    batch: int,
    precision: str = "bf16",
    most: int = MANY,
    margin: float | None = None,
) -> Choice:
    """The best configurations of a software, within the memory margin (None: `with_memory_margin`'s) where there are such.
    AutoparError where it cannot run the model at all so."""
    cluster = with_memory_margin(cluster, margin)
    if precision not in software.precisions:
        raise AutoparError(f"{software.name} has no {precision}: write --dtype {', '.join(software.precisions)}")
    job = Job(
        devices=cluster.size, batch=batch, seq=model.seq, precision=precision, model=model.name, decoder=model.decoder,
        cpu=cluster.device.kind == "cpu",
    )  # fmt: skip
    work = workload_of(software, job, model, cluster)
    if software.name == "megatron":
        job = replace(job, async_tp=work.cluster.overlap.model_parallel)
    pricer = Pricer(work, margin=True)
    allowed = [
        each
        for each in software.space.configurations(work)
        if not software.problems(replace(job, configuration=each), model.decoder)
    ]
    found = rank(pricer, allowed, most)
    if found.best is not None and not found.best.fits:  # at least one that may run
        pricer = replace(pricer, margin=False)
        found = rank(pricer, allowed, most)
    if found.best is None:
        raise AutoparError(
            f"{software.name} has no degrees for a batch of {batch} on {cluster.size} devices: give a batch that they divide"
        )
    if not found.best.fits:
        short = max(each.least_bytes - each.capacity_bytes for each in found.best.evaluation.stage_memory)
        raise Infeasible(
            f"{model.name} does not fit with {software.title} on {cluster.name}: {found.best.configuration.describe(work)} needs "
            f"least and lacks {short / 2**30:.1f} GiB a device; give more devices, a smaller batch or shorter sequences"
        )
    return Choice(software, work, job, found, pricer)


def costs_of_lacks(choice: Choice) -> list[tuple[str, float | None]]:
    """What the software has no key for, with the share of a step that it would save where the software had it, dearest first
    (None: it is not priced). The price is that of the same model with the same constants."""
    best = choice.ranking.best
    assert best is not None
    own = choice.software.space
    out: list[tuple[str, float | None]] = []
    for lack in choice.software.lacks:
        if not lack.space:
            out.append((lack.words, None))
            continue
        work = replace(choice.work, sequence_parallel=choice.work.sequence_parallel or lack.sequence_parallel)
        pricer = choice.pricer if work == choice.work else Pricer(work, choice.pricer.margin)
        known = {each for each in own.configurations(choice.work) if work == choice.work or each.tensor == 1}
        wider = (each for each in replace(own, **lack.space).configurations(work) if each not in known)
        found = rank(pricer, wider, below=best.evaluation.step_seconds).best
        seconds = found.evaluation.step_seconds if found is not None and found.fits else best.evaluation.step_seconds
        out.append((lack.words, max(0.0, 1 - seconds / best.evaluation.step_seconds)))
    return sorted(out, key=lambda pair: -(pair[1] or 0.0))


def files_of(choice: Choice, priced: PricedConfiguration) -> dict[str, str]:
    """The software's own files for one configuration, by name."""
    software, job = choice.software, choice.job_of(priced)
    head = (
        f"{priced.configuration.describe(choice.work)}\n"
        f"{job.devices} devices, batch {job.size}; predicted {priced.evaluation.step_seconds:.4g} s a step\n"
        f"{software.run}"
    )
    main = text_of(software.style, software.write(job), head)
    return {software.file: main, **software.beside(job), **software.also(job)}
