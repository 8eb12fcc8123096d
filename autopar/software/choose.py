"""What to set a software to: the ranking of its configurations for a model on a cluster, and the files that set the best."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.errors import AutoparError, Infeasible
from autopar.software.configuration import Workload
from autopar.software.files.text import text_of
from autopar.software.models import Model, workload_of
from autopar.software.pricer import PricedConfiguration, Pricer
from autopar.software.record import Job, Software
from autopar.software.search import MANY, Ranking, rank


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
