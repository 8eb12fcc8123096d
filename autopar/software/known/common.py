"""Rules that several software share, and the keys of their files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files

import yaml

from autopar.decoders.recognize import RecognizedDecoder
from autopar.software.record import Constraint, Job, Source


@lru_cache(maxsize=8)
def keys_of(software: str) -> Mapping[str, list[str]]:
    """The keys that files of a software may have, by section (empty: outside of all sections): ``data/keys.yaml``."""
    text = (files("autopar.software") / "data" / "keys.yaml").read_text(encoding="utf-8")
    sections: dict[str, str] = yaml.safe_load(text)[software]
    return {section if section != "top" else "": words.split() for section, words in sections.items()}


def world_size(source: Source) -> Constraint:
    """The degrees multiply to the devices."""
    reason = "tp={tensor} x pp={stages} x cp={context} do not divide {devices} devices: choose degrees whose product does"
    return Constraint(reason, lambda job, _: job.data > 0, source)


def heads_divide(source: Source) -> Constraint:
    """Query heads divide by the tensor degree."""

    def holds(job: Job, model: RecognizedDecoder | None) -> bool:
        return model is None or model.sizes.heads % job.configuration.tensor == 0

    return Constraint("tp={tensor} does not divide {heads} attention heads: choose a divisor", holds, source)


def kv_heads_divide(source: Source, either: bool = False) -> Constraint:
    """Key-value heads divide by the tensor degree (`either`: or it by them)."""

    def holds(job: Job, model: RecognizedDecoder | None) -> bool:
        if model is None:
            return True
        heads, tensor = model.sizes.kv_heads, job.configuration.tensor
        return heads % tensor == 0 or (either and tensor % heads == 0)

    word = "neither divides nor is a multiple of" if either else "does not divide"
    return Constraint(f"tp={{tensor}} {word} {{kv_heads}} key-value heads: choose a divisor", holds, source)


def batch_divides(source: Source) -> Constraint:
    """The global batch is whole micro-batches of every data rank."""

    def holds(job: Job, _: RecognizedDecoder | None) -> bool:
        return not job.data or job.batch % (job.data * job.configuration.micro) == 0

    reason = "a batch of {batch} is no multiple of {micro} sequences x {data} data ranks: change the batch or the micro-batch"
    return Constraint(reason, holds, source)


def context_divides(source: Source) -> Constraint:
    """The sequence divides into two chunks for each context rank, which balance causal work."""

    def holds(job: Job, _: RecognizedDecoder | None) -> bool:
        context = job.configuration.context
        return context == 1 or job.seq % (2 * context) == 0

    return Constraint("a sequence of {seq} does not divide by 2 x cp={context}: choose another cp", holds, source)


def experts_divide(source: Source) -> Constraint:
    """The experts divide by the expert degree, and a model without experts has none."""

    def holds(job: Job, model: RecognizedDecoder | None) -> bool:
        degree = job.configuration.experts
        return degree == 1 or (model is not None and bool(model.sizes.experts) and model.sizes.experts % degree == 0)

    return Constraint("ep={experts} does not divide {all_experts} experts: choose a divisor", holds, source)


def layers_fill_chunks(job: Job, model: RecognizedDecoder | None) -> bool:
    """Every chunk of a pipeline has a layer, but for embedding and loss."""
    each = job.configuration
    return model is None or each.stages * each.virtual <= model.layers + 2
