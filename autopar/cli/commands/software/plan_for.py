"""``autopar plan --for``: what another software should be set to, and its own files for that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli.commands.software.fit import captured
from autopar.cli.console import Console, percent, seconds, size

if TYPE_CHECKING:
    from autopar.software.choose import Choice
    from autopar.software.pricer import PricedConfiguration

_SHOWN = 8


def run_for(arguments: argparse.Namespace, console: Console) -> int:
    """Print the ranking of the software's configurations, and write its files where `-o` names a folder."""
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.errors import AutoparError
    from autopar.files import make_folder, write_whole
    from autopar.software.choose import choose, costs_of_lacks, files_of
    from autopar.software.known.registry import software_named
    from autopar.software.models import model_of

    software = software_named(arguments.software)
    if arguments.force:
        raise AutoparError(
            "--force is for autopar's own plans: write the degrees into the software's file, and ask `autopar fit`"
        )
    if arguments.constrain:
        raise AutoparError("--constrain is for autopar's own plans: other software has degrees, and no placements")
    cluster = Cluster.parse(arguments.cluster)
    folder = make_folder(arguments.output) if arguments.output else None
    model = model_of(arguments.model, arguments.seq or 0, captured(console))
    batch = arguments.batch or cluster.size
    found = choose(software, model, cluster, batch, arguments.dtype or "bf16", margin=arguments.memory_margin)
    best = found.ranking.best
    assert best is not None
    files = files_of(found, best)
    costs = costs_of_lacks(found)
    _show(found, best, costs, console)
    if folder is not None:
        for name, text in files.items():
            write_whole(folder / name, text)
            console.text(f"written to {folder / name}")
    else:
        console.code(f"\n{software.file}:\n{files[software.file]}")
    console.document(_document(found, files, costs))
    return 0


def _gain(share: float) -> str:
    return percent(share) if share else "nothing"


def _show(found: Choice, best: PricedConfiguration, costs: Sequence[tuple[str, float | None]], console: Console) -> None:
    from autopar.software.models import Model, constants_note
    from autopar.software.spending import step_interval
    from autopar.solve.fixed.baselines import memory_word

    software, job, cost = found.software, found.job, best.evaluation
    low, high = step_interval(cost.step_seconds, found.work.decoder is not None and bool(found.work.decoder.experts))
    rows = [
        (
            str(number),
            each.configuration.describe(found.work),
            seconds(each.evaluation.step_seconds),
            size(each.evaluation.peak_memory_bytes),
            size(each.evaluation.memory_capacity_bytes - each.evaluation.peak_memory_bytes) if each.fits else "-",
            memory_word(each.evaluation),
            _why(each, best),
        )
        for number, each in enumerate(found.ranking.priced[:_SHOWN], 1)
    ]
    title = f"{software.title}: {job.model} on {found.work.cluster.name}, batch {job.size}, {job.precision}"
    console.table(title, ("", "configuration", "step", "peak memory", "headroom", "", "beside the first"), rows)
    rate, unit = job.batch * (job.seq or 1) / cost.step_seconds / job.devices, "tokens" if job.seq else "samples"
    console.text(
        f"{seconds(cost.step_seconds)} a step ({seconds(low)} to {seconds(high)} as published runs err), "
        f"{rate:.4g} {unit}/s a device, {percent(cost.mfu)} of peak"
    )
    console.text(
        f"{found.ranking.counted} configurations, {len(found.ranking.priced)} priced; the others cannot be faster or do not fit"
        + (f", but {found.ranking.left}, which were left out" if found.ranking.left else "")
    )
    said = ", ".join(f"{words} ({'not priced' if share is None else _gain(share)})" for words, share in costs)
    console.text(f"it cannot express, and what that costs of a step: {said}")
    note = constants_note(software, Model(job.model, job.seq, job.decoder), found.work.cluster)
    if note:
        console.text(f"note: {note}")
    console.text(f"to run: {software.run}")


def _why(each: PricedConfiguration, best: PricedConfiguration) -> str:
    """Say on what a configuration spends more time than the best."""
    if each is best:
        return ""
    one, other = each.evaluation, best.evaluation
    parts = {
        "compute": one.compute_seconds - other.compute_seconds,
        "communication": one.exposed_seconds + one.stall_seconds - other.exposed_seconds - other.stall_seconds,
        "bubble": one.bubble_seconds - other.bubble_seconds,
    }
    name = max(parts, key=lambda key: parts[key])
    return (
        f"+{seconds(parts[name])} {name}"
        if parts[name] > 0.002 * other.step_seconds
        else "too large"
        if not each.fits
        else "alike"
    )


def _document(found: Choice, files: dict[str, str], costs: Sequence[tuple[str, float | None]]) -> dict[str, Any]:
    return {
        "software": found.software.name,
        "model": found.job.model,
        "devices": found.job.devices,
        "batch": found.job.batch,
        "seq": found.job.seq,
        "configurations": found.ranking.counted,
        "ranking": [
            {
                "configuration": asdict(each.configuration),
                "text": each.configuration.describe(found.work),
                "step_seconds": each.evaluation.step_seconds,
                "peak_memory_bytes": each.evaluation.peak_memory_bytes,
                "memory_capacity_bytes": each.evaluation.memory_capacity_bytes,
                "fits": each.fits,
            }
            for each in found.ranking.priced
        ],
        "files": files,
        "lacks": [{"what": words, "step_share": share} for words, share in costs],
    }
