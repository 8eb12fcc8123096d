"""The two files of ``autopar/software/data`` that are drawn from the table of published runs: which recipe a run is an instance
of and what planning shows of it; the memory margin (`hardware.allocator.MEMORY_MARGIN`) and residuals that follow from all runs.

A run that takes ``1 + r`` times its prediction fits where the prediction is at most ``1 / (1 + r)`` of the memory. So a plan that
leaves ``r / (1 + r)`` of it free, where ``r`` is exceeded by one run in fifty, runs out of memory in one case of fifty at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.software.by_hand import MeasuredRun
from autopar.software.configuration import Workload
from autopar.software.spending import quantile
from autopar.validate import configuration
from autopar.validate.architectures import architecture_of, stated
from autopar.validate.configuration import PRESETS
from autopar.validate.price import stack_of
from autopar.validate.rows import Row
from autopar.validate.summary import Comparison, measure_of

_PROXY = "reduced-layer proxy"

RUNS_OUT = 0.02
"""The share of plans that may run out of memory."""


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
    work = configuration.workload_of(row)
    return replace(work, cluster=stack_of(work.cluster, row, None))


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


def measured_runs(rows: Iterable[Row]) -> tuple[MeasuredRun, ...]:
    """Return the runs that are shown beside prices of recipes (`software.by_hand`)."""
    devices = {Cluster.parse(name).device.name: gpu for gpu, (name, _) in PRESETS.items()}
    names = {gpu: name for name, gpu in devices.items()}
    runs = (_measured_run(row, names[row.gpu]) for row in rows if row.gpu in names and row.step_seconds and row.global_batch)
    return tuple(run for run in runs if run is not None)


def _measured_run(row: Row, device: str) -> MeasuredRun | None:
    """None for a run of no recipe, or of a model that is not known in full."""
    try:
        decoder, layers, size = architecture_of(row), stated(row, "layers"), stated(row, "n_gpus")
    except AutoparError:
        return None
    if not recipe_of(row):
        return None
    own: dict[str, Any] = {
        "id": row.id,
        "software": row.software_stack,
        "precision": row.precision,
        "recipe": recipe_of(row),
        "device": device,
    }
    own |= {"devices": size, "layers": layers, "batch": row.global_batch, "step_seconds": row.step_seconds}
    return MeasuredRun(**own, **{each.name: getattr(decoder, each.name) for each in fields(MeasuredRun) if each.name not in own})


def source_of(row: Row) -> str:
    """The repository or paper of a row, without commit and place in it."""
    return row.source.partition("@")[0].partition(":")[0]


def memory_residuals(points: Iterable[Comparison]) -> list[tuple[str, float]]:
    """(source, ``measured / predicted - 1``) of the runs of which the source says what it measured."""
    return [
        (source_of(point.row), measured / point.predicted_bytes - 1)
        for point in points
        if point.predicted_bytes and (measured := point.row.measured_memory_bytes) and measure_of(point.row) != "unstated"
    ]


def margin_of(points: Iterable[Comparison]) -> float:
    """The memory margin under which at most `RUNS_OUT` of the runs would take more than the memory."""
    exceeded = max(0.0, quantile(memory_residuals(points), 1 - RUNS_OUT))
    return exceeded / (1 + exceeded)


def all_residuals(points: Sequence[Comparison]) -> dict[str, list[tuple[str, float]]]:
    """Residuals of memory and of steps as `software.residuals` keeps them, to four digits."""
    steps: dict[str, list[tuple[str, float]]] = {"dense": [], "mixtures": []}
    for point in points:
        if point.error is not None:
            kind = "mixtures" if point.row.n_experts else "dense"
            steps[kind].append((source_of(point.row), round(1 / (1 + point.error) - 1, 4)))
    return {"memory": [(source, round(value, 4)) for source, value in memory_residuals(points)], **steps}
