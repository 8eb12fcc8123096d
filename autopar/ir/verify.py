"""Checks that a candidate fits its graph. The evaluator, the passes and the runtime rely on it; each error names what is wrong.

Start with `verify_candidate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import PlanError
from autopar.ir import dims
from autopar.ir.batch_totals import candidate_totals
from autopar.ir.graph import Block, Graph, Value
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.partition_saved import chosen_tensors, verify_partition
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import check_chunk_borders, repeatable_values
from autopar.ir.placement import Invariant, Placement, Placements, Replicate, can_shard, format_placements
from autopar.ir.plan import OFFLOAD_DEVICES, REDUCTIONS, BlockPlan, Candidate, Conversion, NodePlan


def _verify_weight_versions(candidate: Candidate) -> None:
    """Two weight versions (PipeDream-2BW) run with replicated state, without recomputation, offload or partition, on one chunk a
    stage."""
    pipeline, sharded = candidate.pipeline, candidate.mesh.size_of(DATA_AXIS) > 1
    if pipeline.stages == 1:
        raise PlanError("two versions of weights are for a pipeline: take at least 2 stages")
    for plan in candidate.blocks:
        if plan.recompute or chosen_tensors(plan) or (plan.zero and sharded):
            text = "two versions of weights take whole state (zero=0), and no recomputation, offload or partition"
            raise PlanError(f"{plan.block}: {text}")
    if pipeline.virtual > 1 or pipeline.schedule != "1f1b":
        raise PlanError(f"two versions of weights run on 1f1b with one chunk a stage, not {pipeline.schedule}: change one")
    if candidate.micro_batches < pipeline.stages:
        raise PlanError(
            f"two versions of weights take at least {pipeline.stages} micro-batches (stages), not {candidate.micro_batches}"
        )


def verify_candidate(graph: Graph, candidate: Candidate, devices: int | None = None) -> None:
    """PlanError, one line, for the first thing that does not fit. `devices` is the size of the cluster, if known."""
    _verify_mesh(candidate, devices)
    degree = candidate.mesh.size_of(DATA_AXIS)
    if candidate.batch < 1 or candidate.batch % degree:
        raise PlanError(
            f"the global batch {candidate.batch} does not divide over the data axis dp={degree}: make it a multiple of {degree}"
        )
    count = candidate.micro_batches
    if count < 1 or candidate.batch % (degree * count):
        raise PlanError(f"{count} micro-batches do not divide the {candidate.batch // degree} examples of each data rank")
    if candidate.zero_group < 0 or (candidate.zero_group and degree % candidate.zero_group):
        raise PlanError(f"zero_group={candidate.zero_group} does not divide the data axis dp={degree}: write a divisor, or 0")
    if (where := candidate.precision.offload_optimizer) not in ("", *OFFLOAD_DEVICES):
        raise PlanError(f"offload_optimizer={where[:40]!r}: write one of {', '.join(OFFLOAD_DEVICES)}, or leave it out")
    if (reduce := candidate.precision.reduce) not in ("", *REDUCTIONS):
        raise PlanError(f"precision.reduce={reduce[:40]!r}: write one of {', '.join(REDUCTIONS)}, or leave it out")
    planned, known = [plan.block for plan in candidate.blocks], [block.name for block in graph.blocks]
    if sorted(planned) != sorted(known):
        different = sorted(set(planned) ^ set(known)) or planned
        raise PlanError(f"the plan's blocks are not the graph's: {', '.join(different)}; plan the model again")
    for block in graph.blocks:
        _verify_block(block, candidate.block(block.name), candidate)
    _verify_calls(graph, candidate)
    verify_pipeline(graph, candidate)
    if candidate.micro_batches > 1:
        candidate_totals(graph, candidate)


def _verify_mesh(candidate: Candidate, devices: int | None) -> None:
    mesh, stages = candidate.mesh, candidate.pipeline.stages
    if not mesh.axes or len(set(mesh.names)) != len(mesh.axes) or any(axis.size < 1 for axis in mesh.axes):
        raise PlanError(f"the mesh {mesh} needs axes of distinct names and sizes of at least 1")
    if DATA_AXIS not in mesh.names:
        raise PlanError(f"the mesh {mesh} has no data axis {DATA_AXIS!r}; add it with size 1")
    if devices is not None and candidate.devices != devices:
        times = f" x {stages} stages" if stages > 1 else ""
        raise PlanError(
            f"the mesh {mesh}{times} has {candidate.devices} ranks but the cluster has {devices} devices: "
            "make the axes multiply to it"
        )


MOST_PASSES = 2**17
"""The most passes of micro-batches through chunks of stages in one step, since a schedule lists each: 64 stages and 2,048
micro-batches."""


def verify_pipeline(graph: Graph, candidate: Candidate) -> None:
    """Chunks that are there, on ranks that are there, and nothing between them but values."""
    pipeline = candidate.pipeline
    if pipeline.stages < 1 or pipeline.virtual < 1:
        raise PlanError(f"{pipeline.stages} stages of {pipeline.virtual} chunks are no pipeline: write at least 1")
    if pipeline.weight_versions not in (1, 2):
        raise PlanError(f"weight_versions={pipeline.weight_versions}: write 1, or 2 for gradients that are one update late")
    if pipeline.weight_versions > 1:
        _verify_weight_versions(candidate)
        if graph.outputs:
            raise PlanError(f"two versions of weights return the loss of the batch before, without {graph.outputs[0].path}")
    if pipeline.stages == 1:
        return
    if len(graph.calls) < pipeline.stages * pipeline.virtual:
        raise PlanError(
            f"{graph.name} has {len(graph.calls)} blocks, {pipeline.stages} stages of {pipeline.virtual} chunks need "
            f"{pipeline.stages * pipeline.virtual}: take fewer stages"
        )
    if pipeline.stages * pipeline.virtual * candidate.micro_batches > MOST_PASSES:
        raise PlanError(
            f"{candidate.micro_batches} micro-batches on {pipeline.stages} stages of {pipeline.virtual} chunks are more than "
            f"{MOST_PASSES} passes in a step: take larger micro-batches"
        )
    chunks = chunk_calls(graph, pipeline)
    makers = repeatable_values(graph) if pipeline.repeated else {}
    for name in pipeline.repeated:
        if name not in makers:
            raise PlanError(f"{name} is repeated on every stage, but inputs of the batch do not determine it: leave it out")
    check_chunk_borders(graph, chunks)


def _same_length(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise PlanError(f"{what}: expected {expected} entries, the plan has {found}")


def _verify_placements(where: str, value: Value, placements: Placements, candidate: Candidate) -> None:
    mesh = candidate.mesh
    text = format_placements(placements)
    if len(placements) != len(mesh.axes):
        raise PlanError(
            f"{where}: placements {text!r} of {value.name} have {len(placements)} axes, the mesh {mesh} has {len(mesh.axes)}"
        )
    shape = dims.shape_at(value.shape, candidate.micro_batch)
    if not can_shard(shape, placements, mesh.sizes):
        raise PlanError(
            f"{where}: {value.name} of shape {list(shape)} cannot be {text!r} on {mesh}: a sharded dimension does not divide"
        )


def _verify_block(block: Block, plan: BlockPlan, candidate: Candidate) -> None:
    where, values = f"block {block.name}", block.values()
    if plan.zero not in (0, 1, 2, 3):
        raise PlanError(f"{where}: zero={plan.zero} is not a state sharding; write 0, 1, 2 or 3")
    _same_length(f"{where}, inputs", len(block.inputs), len(plan.inputs))
    _same_length(f"{where}, parameters", len(block.parameters), len(plan.parameters))
    _same_length(f"{where}, outputs", len(block.outputs), len(plan.outputs))
    nodes = {node.name: node for node in block.nodes}
    plans: dict[str, NodePlan] = {each.node: each for each in plan.nodes}
    if len(plans) != len(plan.nodes) or plans.keys() != nodes.keys():
        odd = sorted(plans.keys() ^ nodes.keys()) or sorted(n.node for n in plan.nodes)
        raise PlanError(f"{where}: ops {', '.join(odd[:3])} are unknown, missing or listed twice; plan the model again")

    produced: dict[str, Placements] = {}
    for value, placements in zip(block.inputs, plan.inputs, strict=True):
        produced[value.name] = placements
    for parameter, placements in zip(block.parameters, plan.parameters, strict=True):
        produced[parameter.value.name] = placements
    needed: list[tuple[str, str, Placements]] = []
    for name, node in nodes.items():
        each = plans[name]
        _same_length(f"{where}, operands of {name}", len(node.operands()), len(each.operands))
        _same_length(f"{where}, results of {name}", len(node.outputs), len(each.results))
        produced.update((value.name, placements) for value, placements in zip(node.outputs, each.results, strict=True))
        needed += [(name, operand, placements) for operand, placements in zip(node.operands(), each.operands, strict=True)]
    needed += [("the block's output", name, placements) for name, placements in zip(block.outputs, plan.outputs, strict=True)]

    for name, placements in produced.items():
        _verify_placements(where, values[name], placements, candidate)
    for consumer, name, placements in needed:
        _verify_placements(f"{where}, {consumer}", values[name], placements, candidate)
    reached = _reached(where, plan, values, produced, candidate)
    _verify_recompute(where, plan, produced, plans)
    verify_partition(where, plan, reached, candidate.mesh)
    for consumer, name, placements in needed:
        if placements not in reached[name]:
            raise PlanError(
                f"{where}: {consumer} needs {name} as {format_placements(placements)!r}, but its conversions from "
                f"{format_placements(produced[name])!r} do not reach that"
            )


def _reached(
    where: str, plan: BlockPlan, values: dict[str, Value], produced: dict[str, Placements], candidate: Candidate
) -> dict[str, set[Placements]]:
    """The placements that each value takes on: where it is produced, and the targets of its conversions, which form a tree."""
    conversions: dict[str, list[Conversion]] = {}
    for conversion in plan.conversions:
        _verify_conversion(where, conversion, values, produced, candidate)
        others = conversions.setdefault(conversion.value, [])
        if any(conversion.target == other.target for other in others):
            raise PlanError(f"{where}: conversion {_text(conversion)} leads to a placement that the value already has")
        others.append(conversion)
    reached = {name: {placements} for name, placements in produced.items()}
    for name, pending in conversions.items():
        while ready := [each for each in pending if each.source in reached[name]]:
            reached[name].update(each.target for each in ready)
            pending = [each for each in pending if each not in ready]
        if pending:
            raise PlanError(f"{where}: conversion {_text(pending[0])} starts where the value never is")
    return reached


def _verify_conversion(
    where: str, conversion: Conversion, values: dict[str, Value], produced: dict[str, Placements], candidate: Candidate
) -> None:
    """One conversion changes one axis of a known value, to a placement in which the value is not produced."""
    if conversion.value not in values:
        raise PlanError(f"{where}: a conversion names the value {conversion.value!r}, which the block does not have")
    for placements in (conversion.source, conversion.target):
        _verify_placements(f"{where}, conversion", values[conversion.value], placements, candidate)
    if sum(a != b for a, b in zip(conversion.source, conversion.target, strict=True)) != 1:
        raise PlanError(f"{where}: conversion {_text(conversion)} must change exactly one axis")
    if conversion.target == produced[conversion.value]:
        raise PlanError(f"{where}: conversion {_text(conversion)} leads to a placement that the value already has")


def _text(conversion: Conversion) -> str:
    return f"{conversion.value}: {format_placements(conversion.source)} -> {format_placements(conversion.target)}"


def _verify_recompute(where: str, plan: BlockPlan, produced: dict[str, Placements], plans: dict[str, NodePlan]) -> None:
    """Check that what is recomputed or offloaded exists, and a block that is recomputed as a whole names nothing of it."""
    unknown = [name for name in plan.recompute_nodes if name not in plans] + [
        name for name, _ in plan.offload if name not in produced
    ]
    if unknown:
        raise PlanError(f"{where}: {unknown[0]} is to be recomputed or offloaded, but the block does not have it")
    if set(plan.recompute_conversions) - set(plan.conversions):
        raise PlanError(f"{where}: recompute_conversions has a conversion that is not among conversions")
    if plan.recompute and chosen_tensors(plan):
        raise PlanError(
            f"{where}: recompute is true, so recompute_nodes, recompute_conversions, offload and partition_saved must be empty"
        )


def _boundary(graph: Graph, candidate: Candidate) -> Iterator[tuple[str, str, Placements]]:
    """(kind and name, call, placement) of every place where blocks meet."""
    for call in graph.calls:
        plan, where = candidate.block(call.block), call.prefix or call.block
        for names, placements, kind in (
            (call.inputs, plan.inputs, "value"),
            (call.outputs, plan.outputs, "value"),
            (call.parameters, plan.parameters, "parameter"),
        ):
            for name, each in zip(names, placements, strict=True):
                yield f"{kind} {name}", where, each


def _verify_calls(graph: Graph, candidate: Candidate) -> None:
    seen: dict[str, tuple[str, Placements]] = {}
    for name, where, placements in _boundary(graph, candidate):
        other, expected = seen.setdefault(name, (where, placements))
        if placements != expected:
            raise PlanError(
                f"{name} is {format_placements(expected)!r} at {other} but {format_placements(placements)!r} at {where}: "
                "between blocks it has one placement"
            )
    for output in graph.outputs:
        if f"value {output.value}" not in seen:
            raise PlanError(f"the output {output.path} is the value {output.value}, which no block makes")
    loss = seen.get(f"value {graph.loss}")
    whole: Placement = Replicate() if graph.forward_only else Invariant()
    if loss is None or any(placement != whole for placement in loss[1]):
        raise PlanError(
            f"the loss {graph.loss} must be {type(whole).__name__} ({whole}) on every axis at the end of "
            f"{loss[0] if loss else 'the graph'}"
        )
