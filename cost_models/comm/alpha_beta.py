"""The alpha-beta costs of collectives: the formula of each algorithm and protocol, on the links of one mesh axis.

Each algorithm and protocol is a formula of formulas/collective_formulas.py. All of them are linear in the bytes, so alpha and
beta of one axis are computed once. The algorithms: a *ring* always; for all_reduce also a *tree* and reductions in the *switch*;
*hierarchical* (one level after the other) only where the library does so, as on a torus: NCCL does not, and its measured
all-reduces over nodes contradict it (tests/cost_models/comm/test_nccl_measurements.py). The protocols: one for small messages
(less latency, less bandwidth; NCCL's LL and LL128) beside the one for large messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2, prod

from autopar.cost_models.formulas.formula import Formula
from autopar.cost_models.formulas.registry import formula
from autopar.cost_models.hardware.device_specs import AlphaBetaCost, AxisLink, Level, Link
from autopar.cost_models.hardware.measured_collectives import KINDS, STATE_KINDS

LARGE, SMALL = "", "low latency"
_REFERENCE_BYTES = 2.0**30


def algorithm_costs(kind: str, link: AxisLink) -> tuple[AlphaBetaCost, ...]:
    """Return the costs of every algorithm and protocol of the library; a single free one for a group of one. ValueError on an
    unknown kind."""
    if kind not in KINDS and kind not in STATE_KINDS:
        raise ValueError(f"no collective {kind!r}")
    if kind not in link.cost_cache:
        link.cost_cache[kind] = (
            tuple(_algorithm_costs(kind, link)) if link.size > 1 else (AlphaBetaCost("none", LARGE, 0.0, 0.0),)
        )
    return link.cost_cache[kind]


def _algorithm_costs(kind: str, link: AxisLink) -> Iterable[AlphaBetaCost]:
    algorithms = ("direct",) if kind in ("all_to_all", "point_to_point") else _algorithms(kind, link)
    small = any(level.link.low_latency_bandwidth_bytes_per_second for level in link.levels)
    for algorithm in algorithms:
        for protocol in (LARGE, SMALL) if small else (LARGE,):
            if algorithm != "switch" or protocol == LARGE:
                yield algorithm_cost(kind, algorithm, protocol, link)


def _algorithms(kind: str, link: AxisLink) -> tuple[str, ...]:
    supported = {"ring", "hierarchical"}
    if kind == "all_reduce":
        supported |= {"tree", "switch"} if link.levels[0].link.switch_bandwidth_bytes_per_second else {"tree"}
    return tuple(name for name in link.algorithms if name in supported) or ("ring",)


def algorithm_cost(kind: str, algorithm: str, protocol: str, link: AxisLink) -> AlphaBetaCost:
    """Return the cost of one algorithm and protocol on `link`, whether or not the library would choose it."""
    formula = algorithm_formula(kind, algorithm, link)
    values = formula_values(kind, algorithm, protocol, link)
    latency = formula.value({**values, "N": 0.0})
    waits = ("launch", "s", *(f"a{index}" for index in range(1, len(link.levels) + 1)))
    moved = formula.value({**values, **dict.fromkeys(waits, 0.0), "N": _REFERENCE_BYTES})
    return AlphaBetaCost(algorithm, protocol, latency, moved / _REFERENCE_BYTES)


def algorithm_formula(kind: str, algorithm: str, link: AxisLink) -> Formula:
    """Return the formula of an algorithm over as many levels as `link` has; a message uses the outermost one."""
    return formula(f"{STATE_KINDS.get(kind, kind)}.{algorithm}.{1 if kind == 'point_to_point' else len(link.levels)}")


def measured_factors(kind: str, link: Link) -> tuple[float, float]:
    """Return how many times longer than its formula the library takes on this level, in latency and in transfer; 1 where nothing
    was measured."""
    measured = {name: (latency, transfer) for name, latency, transfer in link.factors}
    return measured.get(kind) or measured.get(STATE_KINDS.get(kind, kind), (1.0, 1.0))


def formula_values(kind: str, algorithm: str, protocol: str, link: AxisLink) -> dict[str, float]:
    """Return values for the formula ``kind.algorithm.levels`` but for the bytes `N`. Steps and bandwidths of a level are those
    that its factors say (a slow inner level does not make the network slower)."""
    levels = link.levels[-1:] if kind == "point_to_point" else link.levels
    nodes = prod(level.width for level in levels[1:]) if len(levels) > 1 else levels[0].width
    values = {"launch": link.launch_seconds, "c": 1.0 if nodes == 2 else 2.0}
    inside = 1
    for index, level in enumerate(levels, 1):
        values[f"w{index}"] = level.width
        step_seconds, rate = _step(level.link, protocol)
        latency_factor, transfer_factor = measured_factors(kind, level.link)
        values[f"a{index}"], values[f"b{index}"] = step_seconds * latency_factor, rate / transfer_factor
        values[f"d{index}"] = level.width - 1 if index == 1 < len(levels) else ceil(log2(level.width))
        values[f"h{index}"] = _all_to_all_share(level, inside, link.size)
        inside *= level.width
    if kind == "point_to_point" and level.peer_bandwidth_bytes_per_second:
        values["b1"] *= level.peer_bandwidth_bytes_per_second / level.link.bandwidth_bytes_per_second
    first = levels[0].link
    latency_factor, transfer_factor = measured_factors(kind, first)
    values["s"] = first.switch_seconds * latency_factor
    values["bs"] = (first.switch_bandwidth_bytes_per_second or first.bandwidth_bytes_per_second) / transfer_factor
    return values


def _step(link: Link, protocol: str) -> tuple[float, float]:
    """Return the seconds of one step, and bytes per second."""
    if protocol == SMALL and link.low_latency_bandwidth_bytes_per_second:
        return link.low_latency_seconds, link.low_latency_bandwidth_bytes_per_second
    return link.latency_seconds, link.bandwidth_bytes_per_second


def _all_to_all_share(level: Level, inside: int, size: int) -> float:
    """Return the share of the tensor that a member sends over a level in all_to_all. Along a ring of w a message makes
    ``floor(w**2 / 4) / w`` hops for each member (both ways round; on a part of a ring the middle cable carries as much)."""
    if level.link.kind == "ring":
        return (level.width**2 // 4) / level.width / size
    return (level.width - 1) * inside / size**2
