"""Seconds of a collective over the groups of one mesh axis.

Latency-bandwidth model (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005; ring
all-reduce: Patarasuk and Yuan 2009). Over several link levels the collective runs hierarchically (inside first, then each
member with its peers across, or the reverse), in chunks that overlap: latencies add up, and of the bandwidth terms the
slowest counts.
"""

from __future__ import annotations

from math import ceil, log2

from autopar.cost_models.hardware import AxisLink

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def collective_seconds(kind: str, full_bytes: float, link: AxisLink) -> float:
    """Seconds of one collective. `full_bytes` is the unsharded tensor as the group sees it (for all_to_all too: each of the n
    members then holds ``full_bytes / n``). ValueError on an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}")
    if link.size == 1:
        return 0.0
    latency = sum((level.width - 1) * level.latency_seconds for level in link.levels)
    if kind == "all_to_all":
        return link.launch_seconds + latency + _exchange_seconds(full_bytes, link)
    if kind == "broadcast":
        return link.launch_seconds + latency + _pass_seconds(full_bytes, link, ring=False)
    once = latency + _pass_seconds(full_bytes, link, ring=True)
    if kind != "all_reduce":
        return link.launch_seconds + once
    tree = sum(ceil(log2(level.width)) * level.latency_seconds for level in link.levels)
    return link.launch_seconds + 2 * min(once, tree + _pass_seconds(full_bytes, link, ring=False))


def _pass_seconds(full_bytes: float, link: AxisLink, *, ring: bool) -> float:
    """The slowest level when every member sends the tensor once: level k carries ``N / (widths inside k)`` of it per device,
    a ring ``(w-1)/w`` of that."""
    slowest, inside = 0.0, 1
    for level in link.levels:
        share = (level.width - 1) / level.width if ring else 1.0
        slowest = max(slowest, full_bytes / inside * share / level.bandwidth_bytes_per_second)
        inside *= level.width
    return slowest


def _exchange_seconds(full_bytes: float, link: AxisLink) -> float:
    """Pairwise exchange: a member sends ``N / n**2`` to each other; those that a level newly joins are reached through it."""
    slowest, inside, each = 0.0, 1, full_bytes / link.size**2
    for level in link.levels:
        joined = inside * level.width
        slowest = max(slowest, each * (joined - inside) / level.bandwidth_bytes_per_second)
        inside = joined
    return slowest
