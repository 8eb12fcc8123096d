"""The table of baselines (DDP, FSDP, Megatron recipes), for `plan`, `inspect` and `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cli.console import Console, seconds, size
from autopar.ir.plan_file.document import Baseline


def baseline_table(
    baselines: Mapping[str, Baseline | None], step_seconds: float | None, peak_bytes: int | None, console: Console
) -> None:
    """Baselines beside the plan, whose step time and peak memory are given."""
    rows = [("this plan", "our programs", seconds(step_seconds), "1", "", "", size(peak_bytes), "")]
    lines = []
    for key, each in baselines.items():
        if each is None:
            continue
        title = each.title or key.upper()
        ratio = f"{each.step_seconds / step_seconds:.3g}" if each.step_seconds and step_seconds and each.fits else "-"
        rows.append(
            (
                title,
                each.software or "our programs",
                seconds(each.step_seconds) if each.fits else "-",
                ratio,
                seconds(each.own_step_seconds) if each.software else "",
                seconds(each.measured_seconds) if each.measured_seconds else "",
                size(each.peak_memory_bytes),
                each.memory,
            )
        )
        lines += _lines(title, each)
    header = ("", "software", "step", "relative to this plan", "by our programs", "measured", "peak memory", "memory")
    console.table("Baselines: what people write by hand, each on the software that it is run on", header, rows)
    for line in lines:
        console.text(line)


def _lines(title: str, each: Baseline) -> list[str]:
    """The configuration in words, what is wrong with it, what was measured of it, and why it is faster than the plan."""
    short = f"out of memory: {size(each.shortfall_bytes)} short" if each.shortfall_bytes else each.problem
    said = [each.configuration, short, f"published: {each.measured}" if each.measured else ""]
    lines = [f"{title}: {'; '.join(filter(None, said))}"] if any(said) else []
    return [*lines, *([f"  {each.reason}"] if each.reason else [])]
