"""A job of a software on a model and a cluster, as the workload that is priced."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.stack_entries import other_constants
from autopar.decoders.graphs import RunOptions
from autopar.ir.plan import Precision
from autopar.software.configuration import Workload
from autopar.software.models import Model
from autopar.software.record import Job, Software
from autopar.software.stacks import SENDS_ONCE, cluster_with, written_by

_PRECISIONS = {
    **{"bf16": Precision("bfloat16", "float32"), "fp16": Precision("float16", "float32"), "fp32": Precision()},
    **{"fp8": Precision("bfloat16", "float32")},
}


def workload_of(software: Software, job: Job, model: Model, cluster: Cluster) -> Workload:
    """The workload: the model as the software writes it, and the cluster as it uses it."""
    name, known = stack_of(software, model, cluster)
    used = cluster_with(name, known, cluster, job.compiled, job.async_tp, job.ep_overlap)
    if job.precision == "fp8":
        used = replace(used, state_layout=replace(used.state_layout, master_remainders=False))
    decoder = model.decoder
    return Workload(
        decoder=written_by(name, decoder) if decoder is not None else None,
        layers=model.layers,
        batch=job.batch,
        cluster=used,
        precision=_PRECISIONS[job.precision],
        optimizer=job.optimizer,
        options=RunOptions(float8=job.precision == "fp8", once=name in SENDS_ONCE),
        whole_experts=software.whole_experts,
        sequence_parallel=software.sequence_parallel,
        graph=model.graph,
    )


def stack_of(software: Software, model: Model, cluster: Cluster) -> tuple[str, str]:
    """(name of the constants, the generation that they were found on)."""
    mixture = model.decoder is not None and bool(model.decoder.sizes.experts)
    return software.stack(cluster.device.generation, mixture)


def constants_note(software: Software, model: Model, cluster: Cluster) -> str:
    """Whose constants price it, where they are not its own on these devices; empty where they are."""
    name, known = stack_of(software, model, cluster)
    note = other_constants(name, known)
    if not note and known != cluster.device.generation:
        return f"no constants of {name} on {cluster.device.generation or 'these devices'}: those on {known}"
    return note
