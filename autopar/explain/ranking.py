"""The costliest operations and collectives of a plan, with the places in the model that they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.evaluate import Evaluation
from autopar.cost_models.hardware import AxisLink, Cluster, links_of_axis
from autopar.cost_models.pipeline import part_of
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Arc, BlockPlan, Candidate, NodePlan
from autopar.rules.conversions import COLLECTIVES


@dataclass(frozen=True, slots=True)
class Cost:
    """One operation or collective of a distinct block. `seconds` of one step: forward, backward and what is run again, of all
    `times` calls (layers x micro-batches). `axis` and `full_bytes` (the unsharded tensor) are set for collectives, and `parts`:
    the collectives of one call as (kind, full bytes, link). `plan` is an operation's, of `block`."""

    what: str
    where: str
    source: str
    times: int
    seconds: float
    axis: str = ""
    full_bytes: float = 0.0
    parts: tuple[tuple[str, float, AxisLink], ...] = ()
    block: str = ""
    plan: NodePlan | None = None


def module_path(graph: Graph, block: str, module: str = "") -> str:
    """The place in the user's model: ``model.layers.*.mlp.up_proj`` where several calls differ in a number."""
    prefixes = [call.prefix for call in graph.calls if call.block == block]
    parts = [prefix.split(".") for prefix in prefixes]
    if parts and len({len(each) for each in parts}) == 1:
        common = ".".join(words[0] if len(set(words)) == 1 else "*" for words in zip(*parts, strict=True))
    else:
        common = prefixes[0] if prefixes else block
    return ".".join(part for part in (common, module) if part) or graph.name


def block_costs(graph: Graph, candidate: Candidate, cluster: Cluster) -> dict[str, BlockCosts]:
    """Price tables of every block of the plan, on the devices of one pipeline stage."""
    part = part_of(cluster, candidate.pipeline.stages)
    return {
        block.name: BlockCosts(block, candidate.mesh, candidate.micro_batch, part, candidate.zero_group) for block in graph.blocks
    }


def operations(graph: Graph, candidate: Candidate, costs: dict[str, BlockCosts]) -> list[Cost]:
    """Every operation, the costliest first. Communication inside named functions is in `collectives`."""
    out = []
    for block in graph.blocks:
        plan, priced = candidate.block(block.name), costs[block.name]
        times = graph.count(block.name) * candidate.micro_batches
        nodes = {node.name: node for node in block.nodes}
        for each in plan.nodes:
            cost, node = priced.node(each), nodes[each.node]
            again = cost.forward_seconds * (plan.recompute or each.node in plan.again)
            seconds = times * (cost.forward_seconds + cost.backward_seconds + again)
            what = f"{(each.function or node.op).split('.')[1]} {each.node}"
            where = module_path(graph, block.name, node.module)
            out.append(Cost(what, where, node.source, times, seconds, block=block.name, plan=each))
    return sorted(out, key=lambda cost: -cost.seconds)


def collectives(graph: Graph, candidate: Candidate, costs: dict[str, BlockCosts], evaluation: Evaluation) -> list[Cost]:
    """Every collective, the costliest first, hidden or not: conversions, named functions, and the state on the data axis."""
    out = list(_state(graph, candidate, evaluation, costs))
    for block in graph.blocks:
        plan = candidate.block(block.name)
        times = graph.count(block.name) * candidate.micro_batches
        out += _conversions(graph, block, plan, costs[block.name], times)
        out += _inside(graph, candidate, block, plan, costs[block.name], times)
    return sorted((cost for cost in out if cost.seconds), key=lambda cost: -cost.seconds)


def _conversions(graph: Graph, block: Block, plan: BlockPlan, costs: BlockCosts, times: int) -> Iterator[Cost]:
    makers = {value.name: node for node in block.nodes for value in node.outputs}
    paths = {parameter.value.name: parameter.path for parameter in block.parameters}
    for arc in plan.arcs:
        cost = costs.arc(arc.value, arc.source, arc.target)
        again = cost.forward_comm_seconds * (plan.recompute or arc in plan.again_arcs)
        kinds = " / ".join(kind.replace("_", "-") for kind in (cost.forward_kind, cost.backward_kind) if kind in COLLECTIVES)
        made = makers.get(arc.value)
        link = links_of_axis(costs.cluster, costs.mesh, cost.axis)
        sent = [(kind, cost.full_bytes, link) for kind in (cost.forward_kind, cost.backward_kind) if kind in COLLECTIVES and kind]
        where = module_path(graph, block.name, made.module if made else paths.get(arc.value, ""))
        yield Cost(
            f"{kinds} of {arc.value}, {_change(arc, cost.axis)}",
            where,
            made.source if made else "",
            times,
            times * (cost.forward_comm_seconds + cost.backward_comm_seconds + again),
            costs.mesh.names[cost.axis],
            cost.full_bytes,
            tuple(sent),
        )


def _change(arc: Arc, axis: int) -> str:
    return f"{arc.source[axis]} -> {arc.target[axis]}"


def _inside(graph: Graph, candidate: Candidate, block: Block, plan: BlockPlan, costs: BlockCosts, times: int) -> Iterator[Cost]:
    nodes = {node.name: node for node in block.nodes}
    for each in plan.nodes:
        if not each.function:
            continue
        cost, node = costs.node(each), nodes[each.node]
        pairs = zip(candidate.mesh.names, cost.forward_comm_seconds, cost.backward_comm_seconds, strict=True)
        for axis, forward, backward in pairs:
            where = module_path(graph, block.name, node.module)
            yield Cost(
                f"inside {each.function.split('.')[1]} {each.node}", where, node.source, times, times * (forward + backward), axis
            )


def _state(graph: Graph, candidate: Candidate, evaluation: Evaluation, costs: dict[str, BlockCosts]) -> Iterator[Cost]:
    """Gathers of weights and reductions of gradients. `BlockTime` has them per call; only ZeRO-3 gathers for each micro-batch,
    and ZeRO-0 and 1 reduce once a step."""
    names = Counter(call.block for call in graph.calls)
    many = candidate.micro_batches
    for time in evaluation.blocks:
        calls = names[time.block]
        gathers, reductions = calls * (many if time.zero == 3 else 1), calls * (many if time.zero >= 2 else 1)
        named = any(call.prefix for call in graph.calls if call.block == time.block)
        where = module_path(graph, time.block) if named else time.block
        data, across = costs[time.block].state_links
        twice = 2 if time.zero == 3 else 1
        sent = [("reduce_scatter" if time.zero else "all_reduce", time.reduce_bytes, data)]
        if across is not None:
            sent.append(("all_reduce", time.reduce_bytes / (data.size if time.zero else 1), across))
        for what, count, seconds, parts in (
            ("all-gather of weights", gathers, time.gather_seconds, [("all_gather", time.gather_bytes, data)] * twice),
            (f"{sent[0][0].replace('_', '-')} of gradients", reductions, time.reduce_seconds, sent),
        ):
            known = tuple(parts) if isclose(sum(collective_seconds(*part) for part in parts), seconds, rel_tol=1e-9) else ()
            yield Cost(
                f"{what}, ZeRO-{time.zero}", where, "", count, count * seconds, DATA_AXIS, parts[0][1], known, time.block
            )
