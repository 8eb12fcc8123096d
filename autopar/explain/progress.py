"""Lines on the measurement of this machine, and on the plan that was chosen, by the logger ``autopar``."""

from __future__ import annotations

import logging

from autopar.ir.describe import cut_short_text
from autopar.ir.plan_file.plan_file import Plan

LOGGER = logging.getLogger("autopar")


def say_measuring(line: str) -> None:
    """Write a line before, and one after, this machine is measured: as a warning, since somebody waits who sees nothing else."""
    LOGGER.warning("%s", line)


def say_plan(plan: Plan) -> None:
    """Write one line: the model, the plan, and what it is predicted to take."""
    predicted = plan.document.predicted
    step = f", {1e3 * predicted.step_seconds:.3g} ms a step" if predicted.step_seconds else ""
    memory = f", {predicted.peak_memory_bytes / 2**30:.3g} GiB a device" if predicted.peak_memory_bytes else ""
    text = f"{plan.document.model.name} on {plan.document.cluster.name}: {plan.describe()}{step}{memory} (predicted)"
    LOGGER.info("%s", text.replace("\n", " "))
    if limit := plan.document.search.cut_short:
        LOGGER.warning("planning %s was %s", plan.document.model.name, cut_short_text(limit))
