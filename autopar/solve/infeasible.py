"""The message of `Infeasible`: how much memory is short and where, and changes that make a plan fit, each shown by a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from autopar.cost_models.hardware.allocator import tensor_budget_bytes
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import OffloadTarget
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.rules.registry import Registry
from autopar.runtime.quantities import size_words
from autopar.solve.bounds.minimum_memory import MinimumMemory, forced_stages, without_forced
from autopar.solve.ilp.solve_mesh import MeshSolver, PricedPlan
from autopar.solve.pipeline.least_memory import least_memory_pipeline
from autopar.solve.space.meshes import divisors
from autopar.solve.space.options import SearchOptions

_GIB = 2.0**30
_MOST_TIMES = 512
_MOST_NODES = 4096
"""Clusters up to so many times the given one, and so many nodes more, are tried."""

_MOST_SOLVED = 24
"""The most integer programs that look for changes."""

_HOST = OffloadTarget("PCIe 4", 64 * _GIB, 25e9, 25e9, 10e-6)
"""The host memory that is assumed where the cluster file has none: 64 GiB and 16 lanes of PCIe 4 for each device."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A change that makes the problem feasible, and the plan that shows it."""

    change: str
    plan: PricedPlan

    def __str__(self) -> str:
        cost = self.plan.evaluation
        return f"{self.change}: then {self.plan} takes {size_words(cost.peak_memory_bytes)} and {cost.step_seconds:.3g} s a step"


def explanation(
    graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry, solvers: Sequence[MeshSolver] = ()
) -> str:
    """Write one line of what is short, then one per change that would do, the cheapest first. `solvers` know a lower bound of the
    shortage."""
    search = MinimumMemory(registry, _MOST_SOLVED, least_memory_pipeline)
    nearest = minimum_memory_plan(graph, cluster, options, search)
    least = min((solver.result.shortage_bytes for solver in solvers), default=0.0)
    if nearest is not None and not nearest.shortage_bytes and not options.force:
        return _nothing_to_shard(graph, cluster)
    lines = [_shortage_text(graph, cluster, options, nearest, least)]
    changes = [str(each) for each in relaxations(graph, cluster, options, search)]
    if nearest is not None and nearest.shortage_bytes:
        unit = _GIB if nearest.evaluation.peak_memory_bytes >= _GIB else 2.0**20
        need = ceil(nearest.evaluation.peak_memory_bytes / (1 - cluster.device.memory_margin) / unit)
        changes = [*_smaller_margin(nearest), *changes]
        changes.append(f"devices of {need} {'GiB' if unit == _GIB else 'MiB'}: then {nearest} fits")
    lines += [f"  {'use' if index == 0 else 'or'} {each}" for index, each in enumerate(changes)]
    return "\n".join(lines)


def _nothing_to_shard(graph: Graph, cluster: Cluster) -> str:
    """Explain that too little is sharded for so many devices, where memory is not short and nothing is forced."""
    batch = f"its batch of {graph.batch} is no multiple of {cluster.size}"
    if graph.batch % cluster.size == 0:
        batch = f"dp={cluster.size} is not possible"
    return (
        f"no plan for {graph.name} shards it over {cluster.name}: {batch}, and on model axes most of it would be computed on "
        f"every rank: give example inputs with a batch that {cluster.size} divides, or take fewer devices"
    )


def _smaller_margin(nearest: PricedPlan) -> Iterator[str]:
    """The margin under which the nearest plan fits, where the devices have the memory for it."""
    peak, capacity = nearest.evaluation.peak_memory_bytes, nearest.evaluation.memory_capacity_bytes
    left = int(1000 * (1 - peak / capacity)) / 1000
    if nearest.shortage_bytes and left >= 0:
        yield (
            f"a memory margin of {100 * left:.3g} % (`--memory-margin {left:g}`): then {nearest} takes {size_words(peak)} and "
            f"{nearest.evaluation.step_seconds:.3g} s a step, and is likelier to run out of memory"
        )


def minimum_memory_plan(graph: Graph, cluster: Cluster, options: SearchOptions, search: MinimumMemory) -> PricedPlan | None:
    """Return the fixed or the solved minimum-memory plan, whichever has the smaller shortage."""
    plans = [search.fixed_plan(graph, cluster, options), search.solved_plan(graph, cluster, options)]
    return min((each for each in plans if each is not None), key=lambda each: each.shortage_bytes, default=None)


def _shortage_text(
    graph: Graph, cluster: Cluster, options: SearchOptions, nearest: PricedPlan | None, least_bytes: float
) -> str:  # fmt: skip
    memory = size_words(cluster.device.memory_bytes)
    margin = cluster.device.memory_margin
    free = f", of which a margin of {100 * margin:.3g} % stays free" if margin else ""
    held = cluster.device.held_bytes
    free += f"{' and' if free else ', of which'} {size_words(held)} are left to other models" if held else ""
    text = f"{graph.name} at batch {graph.batch} does not fit on {cluster.name} with {memory} a device{free}"
    if nearest is None:
        forced = ", ".join(f"{name}={value}" for name, value in options.force.items())
        return f"{text}: no plan under what is forced was found" + (f"; leave some of {forced} open" if forced else "")
    evaluation = nearest.evaluation
    if not nearest.shortage_bytes:
        return (
            f"no plan for {graph.name} was found on {cluster.name} under what is forced, though {nearest} fits: force its degrees"
        )
    stage = max(evaluation.stage_memory, key=lambda each: each.peak_bytes)
    kind, size = max(stage.table.items(), key=lambda row: row[1])
    short = size_words(nearest.shortage_bytes)
    text += f": the plan that takes least memory, {nearest}, is short of {short} at the {stage.place}"
    text += f", where {_KINDS.get(kind, kind)} {size_words(size)}"
    return text + (f"; every plan is short of {size_words(least_bytes)} at least" if 0 < least_bytes < inf else "")


_KINDS = {
    "parameters": "parameters take",
    "optimizer": "the optimizer's state takes",
    "gradients": "gradients take",
    "gathered": "gathered weights take",
    "activations": "saved activations take",
    "temporaries": "temporaries take",
    "collectives": "buffers of collectives take",
    "buffers": "the model's buffers take",
    "inputs": "the batch takes",
    "slack": "the allocator's slack takes",
    "base": "the framework's base takes",
}


# -- relaxations


def relaxations(graph: Graph, cluster: Cluster, options: SearchOptions, search: MinimumMemory) -> Iterator[Relaxation]:
    """Yield the changes that make a plan fit, free ones first: options, then the batch, the host, nodes."""
    yield from _with_less_forced(graph, cluster, options, search)
    if (batch := _smaller_batch(graph, cluster, options, search)) is not None:
        yield batch
    if cluster.host is None and cluster.device.kind != "cpu":
        with_host = replace(cluster, host=_HOST)
        if (fit := search.fitting_plan(graph, with_host, options)) is not None:
            yield Relaxation("offload to a host (`host:` in the cluster's file; say 64 GiB and 25 GB/s a device)", fit)
    if (nodes := fewest_nodes(graph, cluster, options, search)) is not None:
        yield nodes


def _with_less_forced(graph: Graph, cluster: Cluster, options: SearchOptions, search: MinimumMemory) -> Iterator[Relaxation]:
    """Yield each forced option alone left free; all of them where none suffices."""
    useful = False
    together = [list(options.force)] if len(options.force) > 1 else []
    for names in [*([name] for name in options.force), *together]:
        if len(names) > 1 and useful:
            continue
        fit = search.fitting_plan(graph, cluster, without_forced(options, *names))
        if fit is not None:
            useful = True
            degrees = ",".join(f"{name}={options.force[name]}" for name in names)
            yield Relaxation(f"the same without forcing {degrees}", fit)
    if options.pins and (fit := search.fitting_plan(graph, cluster, replace(options, pins={}))) is not None:
        yield Relaxation("the same without pinned placements", fit)


def _smaller_batch(graph: Graph, cluster: Cluster, options: SearchOptions, search: MinimumMemory) -> Relaxation | None:
    """The largest divisor of the batch that fits; solved exactly only for the smallest one that the data ranks allow."""
    if not graph.batch_is_symbolic:
        return None
    smaller = divisors(graph.batch)[-2::-1]
    for batch in smaller:
        fit = search.fitting_plan(replace(graph, batch=batch), cluster, replace(options, batch=batch), exact=False)
        if fit is not None:
            return Relaxation(f"a batch of {batch}", fit)
    for batch in smaller[-1:]:
        fit = search.fitting_plan(replace(graph, batch=batch), cluster, replace(options, batch=batch))
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


def fewest_nodes(graph: Graph, cluster: Cluster, options: SearchOptions, search: MinimumMemory) -> Relaxation | None:
    """The fewest nodes that fit. Degrees that are forced stay, but the data degree grows. Found with fixed plans first; then
    solved ones go below that, as long as `search` may solve."""
    options = without_forced(options, DATA_AXIS)
    each = node_size(cluster)
    sizes = _sizes(graph, cluster, options)
    if tensor_budget_bytes(cluster.device) <= 0:
        return None
    best: tuple[int, PricedPlan] | None = None
    for exact in (False, True):
        low, high = 0, len(sizes) if best is None else sizes.index(best[0])
        while low < high and (search.left > 0 or not exact):
            middle = (low + high) // 2
            fit = search.fitting_plan(graph, enlarged(cluster, sizes[middle]), options, exact)
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
    widths = [width * forced_stages(options) for width in widths]
    most = min(now * _MOST_TIMES, now + _MOST_NODES)
    fitting = {width * data // each for width in widths for data in divisors(graph.batch) if width * data % each == 0}
    return sorted(nodes for nodes in fitting if now < nodes <= most)
