"""Seconds of a collective over the process groups of one mesh axis: as measured, where the cluster has a table of that kind
(`measured_tables`); else those of the fastest algorithm that the library has (`alpha_beta`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from autopar.cost_models.comm.alpha_beta import (
    LARGE,
    algorithm_costs,
    algorithm_formula,
    formula_values,
    measured_factors,
)
from autopar.cost_models.comm.measured_tables import explain_table, measured_table
from autopar.cost_models.formulas.registry import formula
from autopar.cost_models.hardware.device_specs import AxisLink

MEASURED = "measured"
"""Protocol of a collective that a measured table prices."""


@dataclass(frozen=True, slots=True)
class CollectiveAlgorithm:
    """The algorithm and protocol that a collective runs with, and its seconds."""

    algorithm: str
    protocol: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.algorithm} ({self.protocol})" if self.protocol else self.algorithm


def collective_seconds(kind: str, full_bytes: float, link: AxisLink) -> float:
    """Return the seconds of one collective. `full_bytes` is the unsharded tensor as the group sees it (for all_to_all too: each
    of the n members then holds ``full_bytes / n``; for point_to_point what is sent). ValueError on an unknown kind."""
    costs = link.cost_cache.get(kind) or algorithm_costs(kind, link)
    table = link.table_cache[kind] if kind in link.table_cache else measured_table(kind, link)
    if table is not None:
        return table.at(full_bytes)
    best = inf
    for cost in costs:
        seconds = cost.latency_seconds + full_bytes * cost.seconds_per_byte
        if seconds < best:
            best = seconds
    return best


def fastest_algorithm(kind: str, full_bytes: float, link: AxisLink) -> CollectiveAlgorithm:
    """Return the algorithm with the fewest seconds by its formula, with the seconds of `collective_seconds`."""
    cost = min(algorithm_costs(kind, link), key=lambda each: each.seconds(full_bytes))
    table = measured_table(kind, link)
    if table is not None:
        return CollectiveAlgorithm(cost.algorithm, MEASURED, table.at(full_bytes))
    return CollectiveAlgorithm(cost.algorithm, cost.protocol, cost.seconds(full_bytes))


def parameter_server_seconds(full_bytes: float, link: AxisLink, servers: int = 1) -> float:
    """Return the seconds of parameter servers, for comparison only: the members push `full_bytes` each to `servers` machines on
    the outermost level, and pull as much."""
    if link.size == 1:
        return 0.0
    values = formula_values("point_to_point", "direct", LARGE, link)
    return formula("parameter_server.direct.1").value({**values, "N": full_bytes, "n": link.size, "servers": servers})


def explain_collective(kind: str, full_bytes: float, link: AxisLink) -> str:
    """Write the formula of the fastest algorithm, without and with numbers; or the measured sizes around the message."""
    fastest = fastest_algorithm(kind, full_bytes, link)
    if fastest.algorithm == "none":
        return f"{kind}: one member, nothing to send"
    table = measured_table(kind, link)
    if table is not None:
        return explain_table(kind, full_bytes, link, table)
    formula = algorithm_formula(kind, fastest.algorithm, link)
    values: Mapping[str, float] = {**formula_values(kind, fastest.algorithm, fastest.protocol, link), "N": full_bytes}
    levels = link.levels[-1:] if kind == "point_to_point" else link.levels
    texts = [
        f"{level.link.name} {latency:.3g} x the latency and {transfer:.3g} x the transfer"
        for level in levels
        for latency, transfer in (measured_factors(kind, level.link),)
        if (latency, transfer) != (1.0, 1.0)
    ]
    more = f"\n  with {', '.join(texts)} as measured" if texts else ""
    return formula.explain({name: values[name] for name in formula.names}) + more
