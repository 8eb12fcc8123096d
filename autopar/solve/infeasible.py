"""Why nothing fits: what is short, where and by how much, and which changes would do, each found by pricing a plan that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from time import monotonic

from autopar.cost_models.devices import Store
from autopar.cost_models.hardware import Cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.rules.registry import Registry
from autopar.solve.candidates import Attempt
from autopar.solve.meshes import divisors
from autopar.solve.options import SearchOptions
from autopar.solve.smallest import Fit, Smallest, without

_GIB = 2.0**30
_LARGEST = 512
_MOST = 4096
"""Clusters up to so many times the given one, and so many nodes more, are looked at."""

_HOST = Store("PCIe 4", 64 * _GIB, 25e9, 25e9, 10e-6)
"""The host that is supposed where the cluster's file says nothing of one: 64 GiB and 16 lanes of PCIe 4 for each device."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One change that makes the problem feasible, and the plan that shows it."""

    change: str
    fit: Fit

    def __str__(self) -> str:
        found = self.fit.evaluation
        return f"{self.change}: then {self.fit} takes {_gib(found.peak_memory_bytes)} and {found.step_seconds:.3g} s a step"


def explanation(
    graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry, attempts: Sequence[Attempt] = (),
    look_seconds: float = 15.0,
) -> str:  # fmt: skip
    """The message of `Infeasible`: one line of what is short, then one per change that would do, the cheapest first. `attempts`
    know what is lacked at least. Looking ends after `look_seconds`."""
    look = Smallest(registry, monotonic() + look_seconds)
    nearest = smallest_plan(graph, cluster, options, look)
    least = min((attempt.result.excess_bytes for attempt in attempts), default=0.0)
    lines = [_short(graph, cluster, nearest, least)]
    found = [str(each) for each in relaxations(graph, cluster, options, look)]
    if nearest is not None:
        unit = _GIB if nearest.evaluation.peak_memory_bytes >= _GIB else 2.0**20
        need = ceil(nearest.evaluation.peak_memory_bytes / unit)
        found.append(f"devices of {need} {'GiB' if unit == _GIB else 'MiB'}: then {nearest} fits")
    lines += [f"  {'use' if index == 0 else 'or'} {each}" for index, each in enumerate(found)]
    return "\n".join(lines)


def smallest_plan(graph: Graph, cluster: Cluster, options: SearchOptions, look: Smallest) -> Fit | None:
    """Of all plans that were looked at, the one that lacks least."""
    found = [look.quick(graph, cluster, options), look.exact(graph, cluster, options)]
    return min((each for each in found if each is not None), key=lambda each: each.short_bytes, default=None)


def _short(graph: Graph, cluster: Cluster, nearest: Fit | None, least_bytes: float) -> str:
    memory = _gib(cluster.device.memory_bytes)
    text = f"{graph.name} at batch {graph.batch} does not fit on {cluster.name} with {memory} a device"
    if nearest is None:
        return f"{text}: no plan under what is forced was found"
    found = nearest.evaluation
    stage = max(found.stage_memory, key=lambda each: each.peak_bytes)
    kind, size = max(stage.table.items(), key=lambda row: row[1])
    text += f": the plan that takes least memory, {nearest}, is short of {_gib(nearest.short_bytes)} at the {stage.place}"
    text += f", where {_KINDS.get(kind, kind)} {_gib(size)}"
    return text + (f"; every plan is short of {_gib(least_bytes)} at least" if 0 < least_bytes < inf else "")


_KINDS = {
    "parameters": "parameters take",
    "optimizer": "the optimizer's state takes",
    "gradients": "gradients take",
    "gathered": "gathered weights take",
    "activations": "kept activations take",
    "temporaries": "temporaries take",
    "collectives": "buffers of collectives take",
    "buffers": "the model's buffers take",
    "inputs": "the batch takes",
    "slack": "the allocator's slack takes",
    "base": "the framework's base takes",
}


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= 0.1 * _GIB else f"{size_bytes / 2**20:.1f} MiB"


# -- what would do


def relaxations(graph: Graph, cluster: Cluster, options: SearchOptions, look: Smallest) -> Iterator[Relaxation]:
    """What costs nothing first: options, then the batch, the host, nodes."""
    yield from _unforced(graph, cluster, options, look)
    if (batch := _smaller_batch(graph, cluster, options, look)) is not None:
        yield batch
    if cluster.host is None and cluster.device.kind != "cpu":
        told = replace(cluster, host=_HOST)
        if (fit := look.fitting(graph, told, options)) is not None:
            yield Relaxation("a host where tensors wait (`host:` in the cluster's file; say 64 GiB and 25 GB/s a device)", fit)
    if (nodes := smallest_cluster(graph, cluster, options, look)) is not None:
        yield nodes


def _unforced(graph: Graph, cluster: Cluster, options: SearchOptions, look: Smallest) -> Iterator[Relaxation]:
    """Each forced option alone left free; all of them where none suffices."""
    useful = False
    for names in [*([name] for name in options.force), list(options.force)]:
        if not names or (len(names) > 1 and useful):
            continue
        fit = look.fitting(graph, cluster, without(options, *names))
        if fit is not None:
            useful = True
            said = ",".join(f"{name}={options.force[name]}" for name in names)
            yield Relaxation(f"the same without forcing {said}", fit)
    if options.pins and (fit := look.fitting(graph, cluster, replace(options, pins={}))) is not None:
        yield Relaxation("the same without pinned placements", fit)


def _smaller_batch(graph: Graph, cluster: Cluster, options: SearchOptions, look: Smallest) -> Relaxation | None:
    """The largest divisor of the batch that fits; the exact look only at the smallest one that the data ranks allow."""
    if not graph.batch_is_symbolic:
        return None
    smaller = divisors(graph.batch)[-2::-1]
    for batch in smaller:
        fit = look.fitting(replace(graph, batch=batch), cluster, replace(options, batch=batch), exact=False)
        if fit is not None:
            return Relaxation(f"a batch of {batch}", fit)
    for batch in smaller[-1:]:
        fit = look.fitting(replace(graph, batch=batch), cluster, replace(options, batch=batch))
        if fit is not None:
            return Relaxation(f"a batch of {batch}", fit)
    return None


def node_size(cluster: Cluster) -> int:
    """Devices of one node: what all link levels but the last join."""
    return cluster.links[-2].devices if len(cluster.links) > 1 else 1


def enlarged(cluster: Cluster, nodes: int) -> Cluster:
    """The same nodes, `nodes` of them."""
    size = nodes * node_size(cluster)
    last = replace(cluster.links[-1], devices=max(size, cluster.links[-1].devices))
    return replace(cluster, size=size, links=(*cluster.links[:-1], last))


def smallest_cluster(graph: Graph, cluster: Cluster, options: SearchOptions, look: Smallest) -> Relaxation | None:
    """The fewest nodes that fit. Degrees that are forced stay, but the data degree grows. Found by quick looks first; then the
    exact one goes below that, as long as there is time."""
    options = without(options, DATA_AXIS)
    each = node_size(cluster)
    sizes = _sizes(graph, cluster, options)
    if cluster.device.room_bytes <= 0:
        return None
    best: tuple[int, Fit] | None = None
    for exact in (False, True):
        low, high = 0, len(sizes) if best is None else sizes.index(best[0])
        while low < high and not look.late():
            middle = (low + high) // 2
            fit = look.fitting(graph, enlarged(cluster, sizes[middle]), options, exact)
            if fit is not None:
                best, high = (sizes[middle], fit), middle
            else:
                low = middle + 1
    if best is None:
        return None
    nodes, fit = best
    return Relaxation(f"{nodes} nodes" if each > 1 else f"{nodes} devices", fit)


def _sizes(graph: Graph, cluster: Cluster, options: SearchOptions) -> list[int]:
    """Numbers of nodes above the present one whose data ranks divide the batch, with a tensor axis in a node."""
    each = node_size(cluster)
    now = max(1, cluster.size // each)
    widths = [options.force["tp"]] if "tp" in options.force else divisors(each) if each > 1 else [1, 2, 4, 8]
    most = min(now * _LARGEST, now + _MOST)
    fitting = {width * data // each for width in widths for data in divisors(graph.batch) if width * data % each == 0}
    return sorted(nodes for nodes in fitting if now < nodes <= most)
