"""Plans for inference: one set of weights for the prefill of a prompt and for decoding, two graphs without gradients.

The search minimises the seconds of one graph, so for each degree of tensor parallelism both are planned apart, which bounds
them, and then each with the weights where the other one wants them. Of these the shortest prefill + (new tokens - 1) x decode
is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.tensors.sizes import value_bytes
from autopar.errors import AutoparError, BatchError, ClusterError, Infeasible, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Placement, Placements, Replicate, Shard
from autopar.ir.plan import Candidate
from autopar.rules.registry import default_registry
from autopar.solve.ilp.linear_model import Status
from autopar.solve.result import PROVEN_GAP, PlanResult
from autopar.solve.search import search
from autopar.solve.space.grid import dispatches_tokens
from autopar.solve.space.meshes import divisors
from autopar.solve.space.options import SearchOptions

_CACHE = "past_key_values"


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The plans of both graphs, with the same weights; `decode` is None where nothing is decoded. `bound_seconds`: no plan
    without a pipeline on the degrees that were tried is faster. `cache_bytes`: the key-value cache of a device."""

    prefill: PlanResult
    decode: PlanResult | None
    steps: int
    bound_seconds: float = 0.0
    cache_bytes: int = 0

    @property
    def seconds(self) -> float:
        """The seconds from a prompt to its last token."""
        decode = self.decode.evaluation.step_seconds if self.decode is not None else 0.0
        return self.prefill.evaluation.step_seconds + self.steps * decode

    @property
    def tokens_per_second(self) -> float:
        """The new tokens of all sequences; of a forward alone its examples."""
        return self.prefill.candidate.batch * (self.steps + 1) / self.seconds

    @property
    def plan_result(self) -> PlanResult:
        """The plan of the prefill, with the gap of both."""
        gap = 1 - min(self.bound_seconds, self.seconds) / self.seconds
        status = Status.OPTIMAL if gap <= PROVEN_GAP else Status.FEASIBLE
        return replace(self.prefill, status=status, gap=gap)


def search_inference(
    prefill: Graph, decode: Graph | None, cluster: Cluster, options: SearchOptions, new_tokens: int, *,
    throughput: bool = False, progress: Callable[[str], None] | None = None,
) -> InferenceResult:  # fmt: skip
    """Return the plans with the shortest time from a prompt to its last token; with `throughput` for the batch, of 1, 2, 4 ...
    times that of the options, which gives the most tokens a second. Infeasible where none fits."""
    best = _of_batch(prefill, decode, cluster, options, new_tokens, progress)
    while throughput and prefill.batch_is_symbolic and (decode is None or decode.batch_is_symbolic):
        options = replace(options, batch=2 * options.batch)
        try:
            larger = _of_batch(prefill, decode, cluster, options, new_tokens, progress)
        except (Infeasible, BatchError):
            break
        if larger.tokens_per_second <= (1 + options.indifference) * best.tokens_per_second:
            break
        best = larger
    return best


def _of_batch(
    prefill: Graph, decode: Graph | None, cluster: Cluster, options: SearchOptions, new_tokens: int,
    progress: Callable[[str], None] | None,
) -> InferenceResult:  # fmt: skip
    options = replace(options, may_offload_optimizer=False)
    if decode is None:
        alone = search(prefill, cluster, replace(options, force={**options.force, "pp": 1}), progress)
        return InferenceResult(alone, None, 0, alone.lower_bound_seconds)
    out: list[InferenceResult] = []
    bound = inf
    problem: AutoparError | None = None
    for forced, sizes in _degrees(prefill, cluster, options):
        try:
            wanted = (
                search(prefill, cluster, forced, progress),
                search(decode, cluster, _with_cache(decode, forced, sizes), progress),
            )
        except (Infeasible, BatchError, ClusterError) as error:
            problem = problem or error
            continue
        bound = min(bound, wanted[0].lower_bound_seconds + (new_tokens - 1) * wanted[1].lower_bound_seconds)
        out += _both(prefill, decode, cluster, forced, wanted, new_tokens - 1)
    if not out:
        raise problem or Infeasible("no plan of the prefill and of decoding has the same weights: force another tp=")
    return replace(min(out, key=lambda each: each.seconds), bound_seconds=bound)


def _degrees(graph: Graph, cluster: Cluster, options: SearchOptions) -> Iterator[tuple[SearchOptions, Mapping[str, int]]]:
    """Yield the options of each mesh of one tensor-parallel axis, and the size of that. What the axis shards is the search's
    choice, unless the user forces its degree, or experts could take it."""
    registry = options.registry or default_registry()
    by_name = "tp" in options.force or dispatches_tokens(graph, registry)
    for tp in [options.force["tp"]] if "tp" in options.force else divisors(cluster.size):
        force = {**options.force, "pp": 1}
        force |= {"tp": tp} if by_name else {"dp": force.get("dp", cluster.size // tp), "tp2": 1}
        if by_name or force["dp"] * tp == cluster.size:
            yield replace(options, force=force), {"tp": tp}


def _both(
    prefill: Graph, decode: Graph, cluster: Cluster, options: SearchOptions, wanted: tuple[PlanResult, PlanResult], steps: int
) -> Iterator[InferenceResult]:
    """Yield the plans of both graphs with the weights as the one and as the other wants them, where both fit."""
    for number, first in enumerate(wanted):
        sizes = {axis.name: axis.size for axis in first.candidate.mesh.axes}
        zero = max(each.zero for each in first.candidate.blocks)
        fixed = replace(options, force={**options.force, "zero": zero}, stored=stored_placements(first.graph, first.candidate))
        other = (decode, prefill)[number]
        try:
            second = search(other, cluster, fixed if number else _with_cache(decode, fixed, sizes))
        except (Infeasible, PlanError):  # with these weights a forced axis cannot shard what it has to
            continue
        plans = (second, first) if number else (first, second)
        stored = [stored_placements(each.graph, each.candidate) for each in plans]
        if stored[0] != stored[1] or plans[0].candidate.mesh != plans[1].candidate.mesh:
            continue
        held = _cache_bytes(plans[1])
        peak, capacity = plans[0].evaluation.peak_memory_bytes + held, plans[0].evaluation.memory_capacity_bytes
        if capacity is None or peak <= capacity * (1 - cluster.device.memory_margin):
            yield InferenceResult(*plans, steps, cache_bytes=held)


def stored_placements(graph: Graph, candidate: Candidate) -> dict[str, Placements]:
    """Return the placement of each parameter as it is stored, by its name in the model."""
    blocks = {block.block: block for block in candidate.blocks}
    return {name: at for call in graph.calls for name, at in zip(call.parameters, blocks[call.block].parameters, strict=True)}


def _with_cache(graph: Graph, options: SearchOptions, sizes: Mapping[str, int]) -> SearchOptions:
    """Return the options with the cache, where it comes in and where it comes back, sharded by heads on each model axis that
    divides them, as `runtime.cached_generation` has it."""
    arguments = graph.interface.arguments if graph.interface is not None else ()
    inputs = {each.path: each.input for each in arguments if each.path.startswith((f"{_CACHE}.keys.", f"{_CACHE}.values."))}
    shapes = {value.name: value.shape for value in graph.inputs}
    placed: dict[str, Mapping[str, Placement]] = {}
    for name in inputs.values():
        heads, places = int(shapes[name][1]), {}
        for axis, size in sizes.items():
            if axis != DATA_AXIS:
                places[axis] = Shard(1) if size > 1 and heads % size == 0 else Replicate()
                heads = heads // size if heads % size == 0 else heads
        placed[name] = places
    returned = {each.value: placed[inputs[each.path]] for each in graph.outputs if each.path in inputs}
    return replace(options, placed={**placed, **returned})


def _cache_bytes(decode: PlanResult) -> int:
    """Return the bytes of a device's part of the cache."""
    mesh, total = decode.candidate.mesh, 0
    placed = _with_cache(decode.graph, SearchOptions(), dict(zip(mesh.names, mesh.sizes, strict=True))).placed
    for value in decode.graph.inputs:
        if value.name in placed:
            axes = (DATA_AXIS, *(axis for axis, place in placed[value.name].items() if isinstance(place, Shard)))
            total += int(value_bytes(value, decode.candidate.batch)) // prod(map(mesh.size_of, axes))
    return total
