"""``autopar fit``: whether configurations of other software start and fit, how fast they are, and what would be better."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli.console import Console, percent, seconds, size

if TYPE_CHECKING:
    from autopar.ir.graph import Graph
    from autopar.software.fit import Fit

DEFAULT_NODE = "dgx-h100"


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Judge every file. 0: all fit, 3: one does not, 2: one cannot be read (the others are judged all the same)."""
    from autopar.cli.output import say
    from autopar.errors import AutoparError

    status, documents = 0, []
    for path in arguments.config:
        try:
            found = _fit(path, arguments, console)
        except AutoparError as error:
            line = " ".join(str(error).split())
            say(f"autopar: error: {line}")
            documents.append({"file": path, "error": line})
            status = 2
            continue
        _show(found, console)
        documents.append(_document(found))
        status = status if found.fits or status == 2 else 3
    console.document({"files": documents, "exit_status": status})
    return status


def _fit(path: str, arguments: argparse.Namespace, console: Console) -> Fit:
    from autopar.cost_models.hardware.cluster import Cluster, preset_with_devices
    from autopar.software.fit import fit, read_job
    from autopar.software.models import model_of
    from autopar.software.record import Given

    cluster = Cluster.parse(arguments.cluster) if arguments.cluster else None
    given = Given(
        cluster.size if cluster else 0, arguments.batch or 0, arguments.seq or 0, arguments.micro or 0, arguments.recompute or ""
    )
    software, entries, job = read_job(path, given, arguments.software or "")
    source = arguments.model or job.model
    if source:
        model = model_of(source, job.seq or arguments.seq or 0, captured(console))
    elif job.decoder is not None:
        from autopar.software.models import Model

        model = Model(f"{job.decoder.layers} layers of {job.decoder.sizes.hidden}", job.seq or job.decoder.sizes.seq, job.decoder)
    else:
        from autopar.software.files.entries import ConfigError

        raise ConfigError(f"{path}:1: the file does not say which model: add --model NAME, config.json or file.py:factory")
    if cluster is None:
        cluster = preset_with_devices(DEFAULT_NODE, job.devices or 8)
        console.progress(f"{path}: priced on {cluster.size} devices of {DEFAULT_NODE}: say others with --cluster")
    return fit(path, software, entries, job, model, cluster, 0 if arguments.quick else 3)


def captured(console: Console) -> Callable[[str, int], Graph]:
    """Return a function that loads and captures a model that is no decoder by name."""

    def capture_model(source: str, seq: int) -> Graph:
        from autopar.capture import capture
        from autopar.capture.models import load_model

        console.progress(f"capturing {source}")
        loaded = load_model(source, None, seq or None)
        example = loaded.example_inputs
        if isinstance(example, dict):
            return capture(loaded.model, (), example, compute_dtype="bfloat16")
        return capture(loaded.model, example, compute_dtype="bfloat16")

    return capture_model


def _show(found: Fit, console: Console) -> None:
    job, software = found.job, found.software
    title = f"{found.path}: {software.title}, {found.model.name} on {found.work.cluster.name}, batch {job.size}"
    rows = [("configuration", job.configuration.describe(found.work) if job.data else "-")]
    if found.priced is None:
        rows += [("does not start", f"{reason} ({source})") for reason, source in found.problems]
        console.table(title, ("", "does not start"), rows)
        return
    from autopar.software.spending import fitting_share, step_interval
    from autopar.solve.fixed.baselines import memory_word

    cost = found.priced.evaluation
    fullest = cost.fullest_stage
    index = cost.stage_memory.index(fullest)
    share = fitting_share(fullest.peak_bytes, fullest.capacity_bytes)
    low, high = step_interval(cost.step_seconds, found.work.decoder is not None and bool(found.work.decoder.experts))
    kinds = ", ".join(
        f"{kind} {size(amount)}" for kind, amount in sorted(fullest.table.items(), key=lambda item: -item[1])[:5] if amount
    )
    rows += [
        ("memory", f"{memory_word(cost)}: {size(fullest.peak_bytes)} of {size(fullest.capacity_bytes)}"
         + (f" on stage {index} of {len(cost.stage_memory)}" if len(cost.stage_memory) > 1 else "")),
        ("", f"of published runs {percent(share)} would fit with such a prediction"),
        ("", kinds),
        ("step", f"{seconds(cost.step_seconds)}, MFU {percent(cost.mfu)}; runs err: {seconds(low)} to {seconds(high)}"),
        ("costs most", found.costliest or _parts(found)),
    ]  # fmt: skip
    rows += [("note", note) for note in found.notes]
    console.table(title, ("", "fits" if found.fits else "does not fit"), rows)
    for better in found.better:
        one = better.priced.evaluation
        words = better.priced.configuration.describe(found.work)
        console.text(f"better: {words}: {seconds(one.step_seconds)}, {size(one.peak_memory_bytes)}")
        console.code(better.diff + "\n")


def _parts(found: Fit) -> str:
    """The largest part of a step beside compute."""
    assert found.priced is not None
    cost = found.priced.evaluation
    parts = {
        "communication of model axes": cost.exposed_seconds,
        "waiting for the data axis": cost.stall_seconds,
        "pipeline bubble": cost.bubble_seconds,
        "the optimizer": cost.optimizer_seconds,
    }
    name = max(parts, key=lambda key: parts[key])
    return f"{name}: {percent(parts[name] / cost.step_seconds)} of the step" if cost.step_seconds else "-"


def _document(found: Fit) -> dict[str, Any]:
    out: dict[str, Any] = {
        "file": found.path,
        "software": found.software.name,
        "model": found.model.name,
        "devices": found.job.devices,
        "batch": found.job.batch,
        "seq": found.job.seq,
        "precision": found.job.precision,
        "configuration": asdict(found.job.configuration),
        "starts": not found.problems,
        "problems": [{"reason": reason, "source": str(source)} for reason, source in found.problems],
        "fits": found.fits,
        "notes": list(found.notes),
    }
    if found.priced is not None:
        from autopar.software.spending import fitting_share, step_interval

        cost = found.priced.evaluation
        mixture = found.work.decoder is not None and bool(found.work.decoder.experts)
        out |= {
            "step_seconds": cost.step_seconds,
            "step_seconds_interval": list(step_interval(cost.step_seconds, mixture)),
            "peak_memory_bytes": cost.peak_memory_bytes,
            "memory_capacity_bytes": cost.memory_capacity_bytes,
            "memory_by_stage": [dict(stage.table) for stage in cost.stage_memory],
            "fitting_share": fitting_share(cost.peak_memory_bytes, cost.memory_capacity_bytes),
            "mfu": cost.mfu,
            "costs_most": found.costliest or _parts(found),
            "better": [
                {
                    "configuration": asdict(each.priced.configuration),
                    "step_seconds": each.priced.evaluation.step_seconds,
                    "peak_memory_bytes": each.priced.evaluation.peak_memory_bytes,
                    "diff": each.diff,
                }
                for each in found.better
            ],
        }
    return out
