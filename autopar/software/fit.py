"""Whether a configuration that somebody wrote starts, fits, how long its step is, which of its knobs costs most, and what would
be better near it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path

from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.errors import AutoparError
from autopar.software.choose import order_of
from autopar.software.configuration import Configuration, Workload
from autopar.software.files.entries import ConfigError, Entries
from autopar.software.files.formats import read_entries
from autopar.software.files.text import changed_text, difference
from autopar.software.known.registry import known_software
from autopar.software.models import Model, constants_note, workload_of
from autopar.software.pricer import PricedConfiguration, Pricer
from autopar.software.record import Given, Job, Software, Source

_LOOKED_AT = 12
"""Neighbours of a configuration that are evaluated."""
_BETTER = 3
_FASTER = 0.99
"""What is called faster takes at most this share of the time."""
_KNOBS = ("recompute", "micro", "zero", "tensor", "stages", "virtual", "context", "experts", "group", "offload", "host_layers")


@dataclass(frozen=True, slots=True)
class Better:
    """A configuration near somebody's that is faster, or fits where that does not; `diff` is the change of the file."""

    priced: PricedConfiguration
    changed: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True)
class Fit:
    """What is to be said of a file. `problems`: why it does not start. `priced`: its cost, where it starts. `costliest`: the knob
    whose change alone would gain most, in words."""

    path: str
    software: Software
    job: Job
    model: Model
    work: Workload
    problems: tuple[tuple[str, Source], ...]
    priced: PricedConfiguration | None
    costliest: str = ""
    better: tuple[Better, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it starts, and its tensors are within the memory."""
        return self.priced is not None and self.priced.fits


def read_job(path: str, given: Given, software: str = "") -> tuple[Software, Entries, Job]:
    """The software of a file, its entries, and the job that it is. ConfigError where it cannot be read."""
    entries = read_entries(path)
    every = known_software()
    if software:
        found: Software | None = every.get(software)
    else:
        found = next((each for each in every.values() if each.recognizes(entries)), None)
    if found is None:
        raise ConfigError(f"{path}:1: of no software that is known ({', '.join(every)}): name it with --for")
    return found, entries, found.read(entries, given)


def fit(path: str, software: Software, entries: Entries, job: Job, model: Model, cluster: Cluster, better: int = _BETTER) -> Fit:
    """Judge a job that was read from a file."""
    job = replace(job, devices=job.devices or cluster.size, seq=job.seq or model.seq, cpu=cluster.device.kind == "cpu")
    if job.devices != cluster.size:
        raise ConfigError(
            f"{path}:1: the file is for {job.devices} devices, the cluster has {cluster.size}: give a cluster of as many"
        )
    if not job.batch:
        job = replace(job, batch=max(1, job.data) * job.configuration.micro)
    problems = tuple(software.problems(job, model.decoder))
    if job.precision not in software.precisions and job.precision != "fp8":
        problems += ((f"it has no {job.precision}", software.rules[0].source),)
    work = workload_of(software, job, model, with_memory_margin(cluster))
    note = constants_note(software, model, cluster)
    notes = (*job.assumed, *([note] if note else []))
    if problems:
        return Fit(path, software, job, model, work, problems, None, notes=notes)
    pricer = Pricer(work)
    try:
        priced = pricer.price(job.configuration)
    except AutoparError as error:
        return Fit(path, software, job, model, work, ((str(error), software.rules[0].source),), None, notes=notes)
    near = _neighbours(pricer, software, job, model, priced) if better else []
    found = [
        Better(each, _changes(job.configuration, each.configuration), _diff(software, entries, job, each))
        for each in _nearest(job.configuration, near)[:better]
    ]
    return Fit(path, software, job, model, work, (), priced, _costliest(job, priced, near), tuple(found), notes)


def _changes(one: Configuration, other: Configuration) -> tuple[str, ...]:
    return tuple(name for name in _KNOBS if getattr(one, name) != getattr(other, name))


def _neighbours(
    pricer: Pricer, software: Software, job: Job, model: Model, priced: PricedConfiguration
) -> list[PricedConfiguration]:
    """Configurations that differ in few knobs, leave the memory margin, and are faster, or fit where this one does not: those
    that promise most."""
    pricer = replace(pricer, margin=True)
    own, capacity = job.configuration, pricer.work.cluster.device.memory_bytes
    whole = replace(own, share=1.0, layers=(), schedule="1f1b")
    try:
        base = pricer.least(own)
    except AutoparError:
        return []
    found: list[tuple[int, float, Configuration]] = []
    for each in _space(software, pricer.work, own):
        changed = _changes(whole, each)
        if not 1 <= len(changed) <= 3 or software.problems(replace(job, configuration=each), model.decoder):
            continue
        try:
            least = pricer.least(each)
        except AutoparError:
            continue
        if least.bytes > capacity or (priced.fits and least.seconds >= priced.evaluation.step_seconds * _FASTER):
            continue
        found.append((len(changed), least.seconds / base.seconds, each))
    found.sort(key=lambda item: (item[1] + 0.02 * item[0], item[0]))
    singles = [item for item in found if item[0] == 1][: _LOOKED_AT // 2]
    looked_at = [*singles, *(item for item in found if item not in singles)][:_LOOKED_AT]
    out = []
    for _, _, each in looked_at:
        try:
            one = pricer.price(each)
        except AutoparError:
            continue
        if one.fits and (not priced.fits or one.evaluation.step_seconds <= _FASTER * priced.evaluation.step_seconds):
            out.append(one)
    return out


def _space(software: Software, work: Workload, own: Configuration) -> Iterator[Configuration]:
    """The software's configurations, with what the space has no word for as in somebody's own."""
    for each in dict.fromkeys(software.space.configurations(work)):
        yield replace(each, sequence_parallel=own.sequence_parallel if (each.tensor > 1) == (own.tensor > 1) else True)


def _nearest(own: Configuration, found: list[PricedConfiguration]) -> list[PricedConfiguration]:
    return sorted(found, key=lambda each: (len(_changes(own, each.configuration)), order_of(each)))


def _costliest(job: Job, priced: PricedConfiguration, near: list[PricedConfiguration]) -> str:
    """The single change that gains most, in words."""
    alone = [each for each in near if len(_changes(job.configuration, each.configuration)) == 1]
    if not alone or not priced.fits:
        return ""
    best = min(alone, key=lambda each: each.evaluation.step_seconds)
    (knob,) = _changes(job.configuration, best.configuration)
    now, then = getattr(job.configuration, knob), getattr(best.configuration, knob)
    share = 1 - best.evaluation.step_seconds / priced.evaluation.step_seconds
    return f"{knob}={now}: with {then} a step is {share:.0%} shorter"


def _diff(software: Software, entries: Entries, job: Job, better: PricedConfiguration) -> str:
    """The change of somebody's file; in the software's own spelling where the file has another."""
    then = replace(job, configuration=better.configuration)
    now, new = software.write(job), software.write(then)
    spelled = software.spelling(entries) if software.spelling is not None else {}
    new = {spelled.get(key, key): value for key, value in new.items()}
    now = {spelled.get(key, key): value for key, value in now.items()}
    changes = [difference(entries, changed_text(entries, new, now), f"{entries.path} (better)")]
    for name, text in software.beside(then).items():
        path = Path(entries.path).with_name(name)
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        changes += unified_diff(before.splitlines(), text.splitlines(), str(path), f"{path} (better)", lineterm="", n=0)
    return "\n".join(changes)
