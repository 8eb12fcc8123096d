"""Seconds of a collective over the process groups of one mesh axis: as measured, where the cluster has a table of that kind; else
those of the fastest algorithm that the library has (`alpha_beta`).

A level's table is of one number of neighbours. What it says of a size is a slowdown, how many times longer than the alpha-beta
formula among so many neighbours the library took; on an axis with other widths, or over several levels, the formula with the
slowdown of each level is the price, at every size that was measured on one of them. Between these sizes it is linear. Where an
axis is the level that was measured, the price is the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, log

from autopar.cost_models.comm.alpha_beta import (
    LARGE,
    algorithm_costs,
    algorithm_formula,
    formula_values,
    measured_factors,
)
from autopar.cost_models.formulas.registry import formula
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.cost_models.hardware.measured_collectives import STATE_KINDS, MeasuredCollective, PiecewiseLinear

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


_LEAST = 1e-3
"""The least slowdown: a measurement may be shorter than the launch alone."""


def measured_table(kind: str, link: AxisLink) -> PiecewiseLinear | None:
    """Return seconds by the whole tensor's bytes; None where no level of the axis was measured. ValueError on an unknown kind."""
    if kind not in link.table_cache:
        algorithm_costs(kind, link)  # refuses an unknown kind
        levels = link.levels[-1:] if kind == "point_to_point" else link.levels
        has_table = link.size > 1 and any(_nearest_table(kind, level) for level in levels)
        link.table_cache[kind] = _table(kind, link, levels) if has_table else None
    return link.table_cache[kind]


def bends(kind: str, link: AxisLink) -> tuple[float, ...]:
    """Return the bytes at which a measured price changes its slope; none of an alpha-beta price, which is concave."""
    table = measured_table(kind, link)
    return table.sizes if table is not None else ()


def _nearest_table(kind: str, level: Level) -> MeasuredCollective | None:
    """Return the table of this kind, or of the plain collective where state's was not measured, of the nearest width."""
    for name in (kind, STATE_KINDS.get(kind, kind)):
        tables = [each for each in level.link.measured if each.kind == name]
        if tables:
            return min(tables, key=lambda each: abs(log(each.width / level.width)))
    return None


def _table(kind: str, link: AxisLink, levels: tuple[Level, ...]) -> PiecewiseLinear:
    parts, inside, sizes, for_bounds = [], 1, {0.0}, False
    for level in levels:
        measured = _nearest_table(kind, level)
        if measured is not None:
            sizes |= {size * inside for size in measured.table.sizes}
            for_bounds |= measured.for_bounds
        parts.append((level, measured, inside))
        inside *= level.width
    points, least = [], 0.0
    for size in sorted(sizes):
        slowed = tuple(_slow_level(kind, level, measured, size / part, link) for level, measured, part in parts)
        at = replace(link, levels=(*link.levels[: len(link.levels) - len(slowed)], *slowed))
        least = max(least, _formula_seconds(kind, size, at))
        points.append((size, least))
    table = PiecewiseLinear.of(points)
    return table.without_diseconomies() if for_bounds else table


def _slow_level(kind: str, level: Level, table: MeasuredCollective | None, size: float, link: AxisLink) -> Level:
    """Return the level with its latency and transfer as many times longer as it was measured for `size` bytes."""
    if table is None:
        return level
    size = max(size, table.table.sizes[0])
    alone = replace(link, size=table.width, levels=(Level(level.link, table.width),))
    formula = _formula_seconds(kind, size, alone) - link.launch_seconds
    slowdown = max(_LEAST, (table.table.at(size) - link.launch_seconds) / formula) if formula > 0 else 1.0
    return replace(level, link=_with_slowdown(kind, level.link, slowdown))


def _with_slowdown(kind: str, link: Link, slowdown: float) -> Link:
    latency, transfer = measured_factors(kind, link)
    others = tuple(each for each in link.factors if each[0] != kind)
    return replace(link, factors=(*others, (kind, slowdown * latency, slowdown * transfer)))


def _formula_seconds(kind: str, size: float, link: AxisLink) -> float:
    return min(cost.seconds(size) for cost in algorithm_costs(kind, link))


def explain_table(kind: str, full_bytes: float, link: AxisLink, table: PiecewiseLinear) -> str:
    """Write the measured sizes next to the message, and the line between them."""
    after = next((index for index, size in enumerate(table.sizes) if size >= full_bytes), len(table.sizes) - 1)
    after = max(1, after)
    (left, low), (right, high) = table.points[after - 1 : after + 1]
    widths = " x ".join(f"{level.width} on {level.link.name}" for level in link.levels)
    line = f"t1 + (N - N1)*(t2 - t1)/(N2 - N1), as measured, over {widths}"
    numbers = f"{low:.6g} + ({full_bytes:.6g} - {left:.6g})*({high:.6g} - {low:.6g})/({right:.6g} - {left:.6g})"
    return f"{kind} = {line}\n  = {numbers}\n  = {table.at(full_bytes):.6g} seconds"
