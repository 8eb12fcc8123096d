"""The model as blocks: each call with its stage, each distinct block with its operations, their placements and source lines."""

from __future__ import annotations

from typing import Any

from autopar.cost_models.breakdown.step_timeline import StepTimeline
from autopar.cost_models.step.call_trace import CallTrace
from autopar.explain.operation_and_collective_rows import module_path
from autopar.ir.graph import Block, Node
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Partial, Placements, Shard, format_placements
from autopar.ir.plan import BlockPlan, NodePlan
from autopar.ir.plan_file.plan_file import Plan
from autopar.operations.table import operation

_WHOLE = "whole on every rank"


def model_facts(plan: Plan, timeline: StepTimeline) -> dict[str, Any]:
    """Return the calls in order with their stage, and the distinct blocks."""
    graph, mesh = plan.graph, plan.candidate.mesh
    stages = [stage.calls for stage in timeline.evaluation.stages]
    stage_of = {call: number for number, calls in enumerate(stages) for call in calls}
    first = {call.block: stage_of[index] for index, call in reversed(list(enumerate(graph.calls)))}
    names = [block.name for block in graph.blocks if block.name in first]
    return {
        "axes": [axis.name for axis in mesh.axes if axis.size > 1],
        "calls": [
            [call.prefix or call.block, names.index(call.block), stage_of[index]] for index, call in enumerate(graph.calls)
        ],
        "blocks": [
            _block(plan, block, timeline.traces[first[block.name]][block.name]) for block in graph.blocks if block.name in first
        ],
    }


def _block(plan: Plan, block: Block, trace: CallTrace) -> dict[str, Any]:
    chosen = plan.candidate.block(block.name)
    plans = {each.node: each for each in chosen.nodes}
    recomputed = set(chosen.recompute_nodes) | ({node.name for node in block.nodes} if chosen.recompute else set())
    offloaded = {name for name, _ in chosen.offload}
    return {
        "name": block.name,
        "path": module_path(plan.graph, block.name),
        "count": plan.graph.count(block.name),
        "state": _state_words(chosen),
        "operations": [
            {
                "name": node.name,
                "op": plans[node.name].function or node.op,
                "module": node.module,
                "source": node.source,
                "operands": [
                    f"{name}: {_places(each)}" for name, each in zip(node.operands(), plans[node.name].operands, strict=True)
                ],
                "results": [_places(each) for each in plans[node.name].results],
                "sharding": sharding_words(node, plans[node.name], plan.candidate.mesh),
                "seconds": _seconds(trace, plans[node.name]),
                "more": [
                    word
                    for word, names in (("recomputed in the backward", recomputed), ("offloaded to host memory", offloaded))
                    if node.name in names
                ],
            }
            for node in block.nodes
        ],
        "parameters": [
            [each.path, " x ".join(map(str, each.value.shape)), _places(stored)]
            for each, stored in zip(block.parameters, chosen.parameters, strict=True)
        ],
    }


def _state_words(chosen: BlockPlan) -> str:
    words = [f"ZeRO-{chosen.zero}" if chosen.zero else "state replicated"]
    words += ["recomputed whole"] * chosen.recompute
    words += [f"{len(chosen.recompute_nodes)} operations recomputed"] * bool(chosen.recompute_nodes)
    words += [f"{len(chosen.offload)} tensors offloaded"] * bool(chosen.offload)
    return ", ".join(words)


def _places(placements: Placements) -> str:
    return format_placements(placements) or "-"


def _seconds(trace: CallTrace, plan: NodePlan) -> list[float]:
    """Return the seconds of one forward and one backward, without communication."""
    cost = trace.costs.node(plan)
    return [cost.forward_seconds, cost.backward_seconds]


def sharding_words(node: Node, plan: NodePlan, mesh: Mesh) -> list[str]:
    """Return how each axis of more than one rank shards an operation, in the field's words."""
    return [_axis_words(node, plan, index) for index, axis in enumerate(mesh.axes) if axis.size > 1]


def _axis_words(node: Node, plan: NodePlan, axis: int) -> str:
    factor = plan.factors[axis] if axis < len(plan.factors) else ""
    traits, result = operation(node.op), plan.results[0][axis] if plan.results else None
    if traits.splits_backward and factor in ("n", "k"):
        return "column-parallel" if factor == "n" else "row-parallel"
    if isinstance(result, Partial):
        return "partial sums"
    if not isinstance(result, Shard):
        return _WHOLE
    rank, dim = len(node.outputs[0].shape), result.dim
    if dim == 0 and rank > 1:
        return "by batch (dim 0)"
    if rank == 4 and dim == 1:
        return "by heads or channels (dim 1)"
    if rank == 3 and dim == 1:
        return "by sequence (dim 1)"
    return "by the last dim" if dim == rank - 1 else f"by dim {dim}"
