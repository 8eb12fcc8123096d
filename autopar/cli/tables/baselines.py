"""The table of baselines (DDP, FSDP, Megatron recipes), for `plan`, `inspect` and `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cli.console import Console, seconds, size
from autopar.ir.plan_file.document import Baseline


def baseline_table(
    baselines: Mapping[str, Baseline | None], step_seconds: float | None, peak_bytes: int | None, console: Console
) -> None:
    """Baselines beside the plan, whose step time and peak memory are given."""
    rows = [("this plan", "", "our programs", seconds(step_seconds), "1", "", "", size(peak_bytes), "")]
    reasons = []
    for key, each in baselines.items():
        if each is None:
            continue
        ratio = f"{each.step_seconds / step_seconds:.3g}" if each.step_seconds and step_seconds and each.fits else "-"
        note = f"out of memory: {size(each.shortfall_bytes)} short" if each.shortfall_bytes else each.problem
        rows.append(
            (
                each.title or key.upper(),
                each.configuration,
                each.software or "our programs",
                seconds(each.step_seconds) if each.fits else "-",
                ratio,
                seconds(each.own_step_seconds) if each.software else "",
                each.measured,
                size(each.peak_memory_bytes),
                note,
            )
        )
        reasons += [f"{each.title or key.upper()}: {each.reason}."] if each.reason else []
    header = ("", "configuration", "software", "step", "relative to this plan", "by our programs", "measured", "peak memory", "note")
    console.table("Baselines: what people write by hand, each on the software that it is run on", header, rows)
    for reason in reasons:
        console.text(reason)
