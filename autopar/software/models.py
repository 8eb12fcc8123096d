"""Models for software: a decoder in sizes where the name or the configuration says them, without building a module; else the
captured graph. A job of a software on a model and a cluster is the workload that is priced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.stack_entries import other_constants
from autopar.decoders.graphs import RunOptions
from autopar.decoders.recognize import RecognizedDecoder, decoder_of, recognize
from autopar.errors import CaptureError
from autopar.files import read_json
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.model_configs import named_configs
from autopar.software.configuration import Workload
from autopar.software.record import Job, Software
from autopar.software.stacks import SENDS_ONCE, cluster_with, written_by

_LONG = 100_000
"""Models of so many positions are trained with `_LONG_SEQ` tokens by default, others with `_SEQ`."""
_LONG_SEQ, _SEQ = 8192, 4096


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its decoder in sizes, or (None) its captured `graph`; `seq` tokens of a sequence."""

    name: str
    seq: int
    decoder: RecognizedDecoder | None
    graph: Graph | None = None

    @property
    def layers(self) -> int:
        """Layers of a decoder; of a captured graph its calls."""
        return self.decoder.layers if self.decoder is not None else len(self.graph.calls) if self.graph is not None else 1


Captured = Callable[[str, int], Graph]
"""Captures a model by its source and tokens of a sequence (0: its default)."""


def model_of(source: str, seq: int, captured: Captured) -> Model:
    """The model that `source` names: of `named_configs`, a Hugging Face ``config.json``, or whatever `captured` can load."""
    config = named_configs().get(source)
    name = source
    if config is None and source.endswith(".json"):
        config = read_json(Path(source), CaptureError, "the configuration", 2**24)
        name = Path(source).parent.name or Path(source).stem
    if isinstance(config, Mapping):
        tokens = seq or default_seq(config)
        decoder = decoder_of(config, tokens)
        if decoder is not None:
            return Model(name, tokens, decoder)
    graph = captured(source, seq)
    found = recognize(graph)
    return Model(name, found.sizes.seq if found is not None else seq, found, graph if found is None else None)


def default_seq(config: Mapping[str, Any]) -> int:
    """Tokens of a sequence where nobody says how many."""
    longest = config.get("max_position_embeddings") or config.get("n_positions") or _SEQ
    llama = config.get("model_type") == "llama"
    return min(int(longest), _LONG_SEQ if llama and int(longest) > _LONG else _SEQ)


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
