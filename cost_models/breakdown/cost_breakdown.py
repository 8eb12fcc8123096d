"""Every operation and collective of a plan with its seconds in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import StateCost
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.chunk_costs import chunk_costs
from autopar.cost_models.step.evaluate import stage_traces
from autopar.cost_models.step.stage_devices import stage_cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan
from autopar.rules.conversions import COLLECTIVES

PricedCollective = tuple[str, float, AxisLink]
"""Kind, bytes of the unsharded tensor, and the link: the arguments of `collective_seconds`."""


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One operation of a distinct block, without communication inside it.

    times: its calls in a step (layers x micro-batches).
    seconds: of all of them: forward, backward and recomputation.
    """

    block: str
    plan: NodePlan
    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StateCollective:
    """All-gathers of a block's weights, or the reduction of its gradients, under a ZeRO stage."""

    name: str
    zero: int


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective of a distinct block, overlapped or exposed.

    origin: the conversion, the operation that it is inside of, or the parameter state.
    kinds: of the collectives in forward and backward, where they are a conversion's.
    times, seconds: as in `OperationCost`.
    axis: mesh axis, by name.
    full_bytes: of the unsharded tensor (0: inside an operation).
    collectives: those of one call, where their seconds are known one by one.
    """

    block: str
    origin: Conversion | NodePlan | StateCollective
    times: int
    seconds: float
    axis: str
    kinds: tuple[str, ...] = ()
    full_bytes: float = 0.0
    collectives: tuple[PricedCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class CostBreakdown:
    """All operations and collectives of a candidate, the costliest first. `costs` are those of its blocks."""

    operations: tuple[OperationCost, ...]
    collectives: tuple[CollectiveCost, ...]
    costs: Mapping[str, BlockCosts]


def cost_breakdown(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str) -> CostBreakdown:
    """The costs that `evaluate` adds up. Of a pipeline on different devices: operations are priced on the whole cluster's
    device."""
    part = stage_cluster(cluster, candidate.pipeline.stages)
    costs = {
        block.name: BlockCosts(block, candidate.mesh, candidate.micro_batch, part, candidate.zero_group) for block in graph.blocks
    }
    operations: list[OperationCost] = []
    collectives = list(_state_collectives(graph, candidate, cluster, optimizer, costs))
    for block in graph.blocks:
        plan, times = candidate.block(block.name), graph.count(block.name) * candidate.micro_batches
        operations += _operations(plan, costs[block.name], times)
        collectives += _conversions(plan, costs[block.name], times)
        collectives += _inside_operations(plan, costs[block.name], times)
    return CostBreakdown(
        operations=tuple(sorted(operations, key=lambda cost: -cost.seconds)),
        collectives=tuple(sorted((cost for cost in collectives if cost.seconds), key=lambda cost: -cost.seconds)),
        costs=costs,
    )


def _operations(plan: BlockPlan, costs: BlockCosts, times: int) -> Iterator[OperationCost]:
    for each in plan.nodes:
        cost = costs.node(each)
        recompute = cost.forward_seconds * (plan.recompute or each.node in plan.recompute_nodes)
        yield OperationCost(plan.block, each, times, times * (cost.forward_seconds + cost.backward_seconds + recompute))


def _conversions(plan: BlockPlan, costs: BlockCosts, times: int) -> Iterator[CollectiveCost]:
    for each in plan.conversions:
        cost = costs.conversion(each.value, each.source, each.target)
        recompute = cost.forward_comm_seconds * (plan.recompute or each in plan.recompute_conversions)
        kinds = tuple(kind for kind in (cost.forward_kind, cost.backward_kind) if kind is not None and kind in COLLECTIVES)
        link = links_of_axis(costs.cluster, costs.mesh, cost.axis)
        yield CollectiveCost(
            block=plan.block,
            origin=each,
            times=times,
            seconds=times * (cost.forward_comm_seconds + cost.backward_comm_seconds + recompute),
            axis=costs.mesh.names[cost.axis],
            kinds=kinds,
            full_bytes=cost.full_bytes,
            collectives=tuple((kind, cost.full_bytes, link) for kind in kinds if kind),
        )


def _inside_operations(plan: BlockPlan, costs: BlockCosts, times: int) -> Iterator[CollectiveCost]:
    for each in plan.nodes:
        if each.function:
            cost = costs.node(each)
            for axis, forward, backward in zip(
                costs.mesh.names, cost.forward_comm_seconds, cost.backward_comm_seconds, strict=True
            ):
                yield CollectiveCost(block=plan.block, origin=each, times=times, seconds=times * (forward + backward), axis=axis)


def _state_collectives(
    graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str, costs: Mapping[str, BlockCosts]
) -> Iterator[CollectiveCost]:
    """Of each block's own parameters. Only ZeRO-3 gathers for each micro-batch; ZeRO-0 and 1 reduce once a step."""
    states = _call_states(graph, candidate, cluster, optimizer)
    calls, micro_batches = Counter(call.block for call in graph.calls), candidate.micro_batches
    first = {call.block: index for index, call in reversed(list(enumerate(graph.calls)))}
    for block in (block.name for block in graph.blocks if block.name in first):
        zero, state, count = candidate.block(block).zero, states[first[block]], calls[block]
        data, across = costs[block].state_links
        gathers: list[PricedCollective] = [("all_gather", state.gather_bytes, data)] * (2 if zero == 3 else 1)
        reductions: list[PricedCollective] = [("reduce_scatter" if zero else "all_reduce", state.reduce_bytes, data)]
        if across is not None:
            reductions.append(("all_reduce", state.reduce_bytes / (data.size if zero else 1), across))
        gather_seconds = state.gather_forward_seconds + state.gather_backward_seconds
        for name, each_micro_batch, seconds, collectives in (
            ("all-gather of weights", zero == 3, gather_seconds, gathers),
            (f"{reductions[0][0].replace('_', '-')} of gradients", zero >= 2, state.reduce_seconds, reductions),
        ):
            times = count * (micro_batches if each_micro_batch else 1)
            known = isclose(sum(collective_seconds(*each) for each in collectives), seconds, rel_tol=1e-9)
            yield CollectiveCost(
                block=block,
                origin=StateCollective(name, zero),
                times=times,
                seconds=times * seconds,
                axis=DATA_AXIS,
                full_bytes=collectives[0][1],
                collectives=tuple(collectives) if known else (),
            )


def _call_states(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str) -> dict[int, StateCost]:
    """Of each call's own parameters, by its index."""
    chunks = chunk_costs(graph, candidate, cluster, stage_traces(graph, candidate, cluster), optimizer_named(optimizer))
    return {index: state for chunk in chunks for index, state in zip(chunk.owned.calls, chunk.owned.states, strict=True)}
