"""Published runs beside recipes: which recipe a run is an instance of, and which runs are of a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.validate.architectures import Architecture, architecture_of, stated
from autopar.validate.configuration import (
    FLOAT8,
    PRESETS,
    WHOLE_EXPERTS,
    cluster_of,
    configuration_of,
    packed_samples,
    sends_once,
)
from autopar.validate.price import stack_of
from autopar.validate.recipes.knobs import Workload
from autopar.validate.rows import Row, bundled_table, read_table

_WITHOUT_SEQUENCE_PARALLELISM = ("megatron-lm-2021", "megatron-deepspeed")
_PROXY = "reduced-layer proxy"
_VOCABULARY = 0.02
"""Vocabularies are padded: they are equal to this share."""


def recipe_of(row: Row) -> str:
    """The recipe that a run is an instance of: ``ddp``, ``fsdp``, ``fsdp_tp`` or ``megatron``; empty where it is of none (a
    pipeline of ZeRO-3, state that is not stated)."""
    model, state = (row.tp or 1, row.pp or 1), row.zero_stage_or_fsdp
    if state in ("zero3", "hsdp", "zero2") and model[1] == 1 and not row.n_experts and (row.cp or 1) == 1:
        return "fsdp" if model[0] == 1 else "fsdp_tp"
    if state == "none" and model == (1, 1) and not row.n_experts:
        return "ddp"
    return "megatron" if state in ("none", "zero1") else ""


def workload_of(row: Row) -> Workload:
    """The workload of a run, with the constants of its software. AutoparError where the run cannot be expressed."""
    fixed = configuration_of(row)
    return Workload(
        decoder=architecture_of(row),
        layers=stated(row, "layers"),
        batch=stated(row, "global_batch"),
        cluster=stack_of(cluster_of(row), row, None),
        precision=fixed.precision,
        float8=row.precision in FLOAT8,
        once=sends_once(row),
        whole_experts=row.software_stack.startswith(WHOLE_EXPERTS),
        sequence_parallel=row.software_stack not in _WITHOUT_SEQUENCE_PARALLELISM,
        packed=packed_samples(row),
    )


def comparable_runs(rows: Iterable[Row]) -> list[list[Row]]:
    """Measured runs that a recipe stands for, in groups: of one group only the knobs differ, and its fastest is what people
    get. Proxies of a larger model, a few of its layers on a few devices, are none: they keep the configuration of the whole."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        if not row.step_seconds or not recipe_of(row) or _PROXY in row.notes:
            continue
        sizes = row.layers, row.hidden, row.ffn_hidden, row.heads, row.kv_heads, row.vocab, row.seq_len, row.n_experts, row.top_k
        hardware = row.gpu, row.n_gpus, row.device_variant, row.nic_gbit_per_device
        software = row.software_stack, row.compiled, row.precision, row.attention, row.async_tp, row.ep_overlap, recipe_of(row)
        found.setdefault((sizes, hardware, software, row.global_batch), []).append(row)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A published run of the same model on as many of the same devices. `same_batch`: also of the same batch, so its time is
    comparable as it is."""

    row: Row
    same_batch: bool

    @property
    def tokens_per_second_per_device(self) -> float:
        row = self.row
        return (row.global_batch or 0) * (row.seq_len or 0) / (row.step_seconds or 1.0) / (row.n_gpus or 1)


def runs_of(decoder: Architecture, layers: int, cluster: Cluster, batch: int) -> tuple[MeasuredRun, ...]:
    """The published runs of a model on a cluster, of every software and precision, those of the same batch first."""
    preset = _device_names().get(cluster.device.name)
    found = [
        MeasuredRun(row, row.global_batch == batch)
        for row in _measured()
        if row.gpu == preset and row.n_gpus == cluster.size and row.layers == layers and _same_sizes(row, decoder)
    ]
    return tuple(sorted(found, key=lambda each: (not each.same_batch, each.row.step_seconds or 0.0)))


@lru_cache(maxsize=1)
def _device_names() -> Mapping[str, str]:
    """How the table calls a device of the presets."""
    return {Cluster.parse(name).device.name: gpu for gpu, (name, _) in PRESETS.items()}


@lru_cache(maxsize=1)
def _measured() -> tuple[Row, ...]:
    return tuple(row for row in read_table(bundled_table()) if row.step_seconds and row.global_batch)


def _same_sizes(row: Row, decoder: Architecture) -> bool:
    if row.hidden != decoder.hidden or row.seq_len != decoder.seq:
        return False
    try:
        found = architecture_of(row)
    except AutoparError:
        return False
    names = ("ffn", "heads", "head_dim", "gated", "experts", "top_k", "shared_ffn")
    alike = all(getattr(found, name) == getattr(decoder, name) for name in names)
    heads = max(found.kv_heads, decoder.kv_heads) <= 2 * min(found.kv_heads, decoder.kv_heads)
    return alike and heads and abs(found.vocab - decoder.vocab) <= _VOCABULARY * decoder.vocab
