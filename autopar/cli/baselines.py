"""The table of what people write by hand, for `plan`, `inspect` and `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cli.output import Output, seconds, size
from autopar.ir.document import Baseline


def baseline_table(baselines: Mapping[str, Baseline | None], step: float | None, peak_bytes: int | None, output: Output) -> None:
    """Baselines beside the plan, whose step and peak memory are given."""
    rows = [("this plan", "", seconds(step), "1", size(peak_bytes), "")]
    for key, each in baselines.items():
        if each is None:
            continue
        ratio = f"{each.step_seconds / step:.3g}" if each.step_seconds and step and each.fits else "-"
        taken = seconds(each.step_seconds) if each.fits else "-"
        said = f"does not fit: short of {size(each.short_bytes)}" if each.short_bytes else each.problem
        rows.append((each.title or key.upper(), each.configuration, taken, ratio, size(each.peak_memory_bytes), said))
    output.table("What people do by hand", ("", "configuration", "step", "times this plan", "peak memory", "note"), rows)
