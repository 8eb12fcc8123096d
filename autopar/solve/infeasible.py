"""Why nothing fits, in one line: what is short, by how much, and how many nodes would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from time import monotonic

from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.rules.registry import Registry
from autopar.solve.candidates import Attempt, MeshResult
from autopar.solve.meshes import meshes
from autopar.solve.options import SearchOptions
from autopar.solve.problem import build

_GIB = 2.0**30
_LARGEST = 512
"""Clusters up to so many times the given one are looked at."""


def explanation(
    graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry, attempts: Sequence[Attempt],
    look_seconds: float = 15.0,
) -> str:  # fmt: skip
    """The message of `Infeasible`; looking for a cluster that would do ends after `look_seconds`."""
    nearest = min((attempt.result for attempt in attempts), key=lambda result: result.excess_bytes or inf)
    where = f"{graph.name} at batch {graph.batch} does not fit on {cluster.name}"
    short = f"the nearest mesh, {nearest.mesh}, is short of {nearest.excess_bytes / _GIB:.1f} GiB"
    of = f"of device memory ({cluster.device.memory_bytes / _GIB:.1f} GiB each{_largest(attempts)})"
    nodes = smallest_cluster(graph, cluster, options, registry, look_seconds)
    if nodes is None:
        return f"{where}: {short} {of}; use a smaller batch or sequence, or devices with more memory"
    return f"{where}: {short} {of}; {nodes} would do, or a smaller batch"


def _largest(attempts: Sequence[Attempt]) -> str:
    """What takes most of the memory of the fastest plan that was looked at."""
    priced = [attempt.result.evaluation for attempt in attempts if attempt.result.evaluation is not None]
    if not priced:
        return ""
    kind, size = max(min(priced, key=lambda each: each.step_seconds).memory, key=lambda row: row[1])
    return f", where {kind} take {size / _GIB:.1f} GiB in the fastest plan"


def node_size(cluster: Cluster) -> int:
    """Devices of one node: what all link levels but the last join."""
    return cluster.links[-2].devices if len(cluster.links) > 1 else 1


def enlarged(cluster: Cluster, nodes: int) -> Cluster:
    """The same nodes, `nodes` of them."""
    size = nodes * node_size(cluster)
    last = replace(cluster.links[-1], devices=max(size, cluster.links[-1].devices))
    return replace(cluster, size=size, links=(*cluster.links[:-1], last))


def smallest_cluster(
    graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry, look_seconds: float
) -> str | None:
    """``12 nodes`` (or devices), the fewest that fit by the linear relaxation; None where none was found in time."""
    began = monotonic()
    each = node_size(cluster)
    low = max(1, cluster.size // each)
    high = low

    def late() -> bool:
        return monotonic() - began > look_seconds

    while not late() and high <= low * _LARGEST:
        high *= 2
        if _fits(graph, enlarged(cluster, high), options, registry):
            break
    else:
        return None
    low = high // 2
    while high - low > 1 and not late():
        middle = (low + high) // 2
        if _fits(graph, enlarged(cluster, middle), options, registry):
            high = middle
        else:
            low = middle
    return f"{high} nodes" if each > 1 else f"{high} devices"


def _fits(graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry) -> bool:
    """Whether some mesh with at most one model axis fits; degrees that are forced stay, but the data degree grows."""
    force = {name: value for name, value in options.force.items() if name not in (DATA_AXIS, "zero")}
    try:
        grid = [mesh for mesh in meshes(cluster.size, graph.batch, force) if len(mesh.axes) < 3 or "tp2" in force]
    except AutoparError:
        return False
    for mesh in sorted(grid, key=lambda mesh: abs(mesh.size_of("tp") - 8)):
        problem = build(graph, mesh, cluster, options.precision, options.optimizer, registry, options.zeros, options.pins)
        attempt = Attempt(graph, problem, (), options.relative_gap, MeshResult(mesh))
        if attempt.repeats_everything():
            continue
        variants = (attempt.recomputed(), attempt)
        if any(each is not None and each.missing_bytes(10.0) <= 0 for each in variants):
            return True
    return False
