"""For `inspect --comm`: the gradient exchange of one step by collectives, and by parameter servers for comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.cli.console import Console, seconds, size
from autopar.cli.evaluation import cluster_of
from autopar.ir.plan_file.plan_file import Plan


def gradient_table(plan: Plan, console: Console) -> list[dict[str, Any]]:
    """Prints the table and returns its rows. Empty on one data rank, and where the plan does not describe its cluster."""
    from autopar.cost_models.breakdown.gradient_exchange import gradient_exchanges

    cluster = cluster_of(plan)
    if cluster is None:
        return []
    found = gradient_exchanges(plan.graph, plan.candidate, cluster)
    rows = [(each.method, size(each.bytes), seconds(each.seconds), f"{each.relative:.3g}") for each in found]
    if rows:
        console.table("Gradient exchange without overlap, for comparison", ("method", "bytes", "time", "relative"), rows)
    return [dataclasses.asdict(each) for each in found]
