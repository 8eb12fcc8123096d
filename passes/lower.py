"""Lowering of a captured graph under a plan to the program of one rank: the list of all passes, and the driver that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.batch_totals import why_one_graph
from autopar.ir.dims import has_batch
from autopar.ir.graph import Block, Graph, Value
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_values import values_with_gradients
from autopar.ir.placement import Invariant, Placements, Replicate, Shard
from autopar.ir.plan import BlockPlan, Candidate
from autopar.ir.schedule import Schedule
from autopar.ir.verify import verify_pipeline
from autopar.passes.base import BlockState, Context, Pass
from autopar.passes.bucket_conversions import BucketConversions
from autopar.passes.dead_code import DeadCode
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.localize import ChunkLosses, Localize, localize_value
from autopar.passes.lowered import Lowered, LoweredBlock, LoweredChunk, LoweredOutput, StoredParameter
from autopar.passes.mark_recompute import MarkRecompute
from autopar.passes.overlap import OverlapCollectives, OverlapExpertDispatch
from autopar.passes.parameters import CastParameters, CopyParameterViews, stored_dtype
from autopar.passes.readable_names import ReadableNames
from autopar.passes.split_stages import ChunkedGraph, split_stages
from autopar.passes.split_totals import split_totals
from autopar.passes.verify import verify
from autopar.rules.localize import require_uneven
from autopar.schedules.communicate import with_communication
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.weight_versions import weight_version_window, window_with_transfers

Dump = Callable[[str, str], None]
"""Takes the name of an IR dump, ``LlamaDecoderLayer.03.localize``, and its text."""


def passes() -> tuple[Pass, ...]:
    """Return all rewrites of a block, in order."""
    return (
        InsertConversions(),
        MarkRecompute(),
        Localize(),
        ChunkLosses(),
        DeadCode(),
        CastParameters(),
        CopyParameterViews(),
        BucketConversions(),
        OverlapExpertDispatch(),
        OverlapCollectives(),
        ReadableNames(),
    )


def lower(graph: Graph, candidate: Candidate, dump: Dump | None = None, *, uneven: bool = False) -> Lowered:
    """Return the program of one rank. PlanError where the candidate does not fit the graph. `dump` gets the IR after each pass.
    `uneven`: the batch does not divide over the data ranks, whose shards of it differ by one example; PlanError where something
    in the graph does not allow that."""
    data_ranks = candidate.mesh.size_of(DATA_AXIS)
    parts = data_ranks * candidate.micro_batches
    if uneven:
        require_uneven(graph, candidate)
    elif candidate.batch % parts:
        times = f" and {candidate.micro_batches} micro-batches" if candidate.micro_batches > 1 else ""
        raise PlanError(f"a batch of {candidate.batch} is not divisible by dp={data_ranks}{times}")
    if candidate.pipeline.stages > 1 and (reason := why_one_graph(graph)):
        raise PlanError(f"{reason}, which a pipeline cannot have: take pp=1")
    split = split_totals(graph, candidate)
    staged = split_stages(split.graph, split.candidate)
    graph, candidate = staged.graph, staged.candidate
    piped = candidate.pipeline.stages > 1
    schedule = _schedule(staged) if piped else None
    batch = -(-candidate.batch // parts)
    blocks = tuple(_lower_block(block, candidate, batch, uneven, dump) for block in graph.blocks)
    placements = _input_placements(graph, candidate)
    context = Context(candidate.mesh, candidate.blocks[0], candidate.precision, batch, uneven=uneven)
    return Lowered(
        graph=graph,
        candidate=candidate,
        batch=batch,
        inputs=tuple(localize_value(value, placements[value.name], context) for value in graph.inputs),
        input_placements=tuple((value.name, _placement_texts(placements[value.name], candidate)) for value in graph.inputs),
        blocks=blocks,
        total_calls=split.calls,
        totals=split.totals,
        chunks=_chunks(staged, context),
        schedule=schedule,
        outputs=_outputs(graph, candidate),
        uneven=uneven,
    )


def _outputs(graph: Graph, candidate: Candidate) -> tuple[LoweredOutput, ...]:
    """Return each output with its placement at the end of the program."""
    places = {
        name: where for call in graph.calls for name, where in zip(call.outputs, candidate.block(call.block).outputs, strict=True)
    }
    return tuple(
        LoweredOutput(each.path, each.value, _output_placements(places[each.value], candidate, each.kind), each.kind)
        for each in graph.outputs
    )


def _output_placements(placements: Placements, candidate: Candidate, kind: str) -> tuple[tuple[str, str], ...]:
    """Return the placements of an output; where it takes gradients, Invariant and Replicate differ."""
    if kind != "gradient":
        return _placement_texts(placements, candidate)
    pairs = zip(candidate.mesh.names, placements, strict=True)
    return tuple((axis, str(where)) for axis, where in pairs if where != Replicate())


def _schedule(staged: ChunkedGraph) -> Schedule:
    """Return the actions of all ranks, communication included. PlanError where its weight versions are not possible."""
    candidate = staged.candidate
    pipeline = candidate.pipeline
    if pipeline.weight_versions == 1:
        return with_communication(schedule_of(pipeline, candidate.micro_batches), _zero_of_chunks(staged))
    verify_pipeline(staged.graph, candidate)
    return window_with_transfers(weight_version_window(pipeline.stages, candidate.micro_batches))


def _zero_of_chunks(staged: ChunkedGraph) -> tuple[int, ...] | None:
    """Return the ZeRO stage of each model chunk: 1 or 2 where some of its blocks gather once a step, 3 where all do per call."""
    if staged.candidate.mesh.size_of(DATA_AXIS) == 1:
        return None
    plans = {plan.block: plan for plan in staged.candidate.blocks}
    out = []
    for chunk in staged.chunks:
        stages = {plans[call.block].zero for call in chunk.calls if call.parameters}
        out.append(max(stages & {1, 2}, default=max(stages, default=0)))
    return tuple(out)


def _chunks(staged: ChunkedGraph, context: Context) -> tuple[LoweredChunk, ...]:
    """Return the model chunks, with the local shapes of what is sent between them."""
    graph, candidate = staged.graph, staged.candidate
    values: dict[str, Value] = {}
    sent_names = {name for chunk in staged.chunks for name in (*chunk.receives, *chunk.sends)}
    reached = values_with_gradients(graph)
    for call in graph.calls:
        for slot, name in enumerate(call.outputs):
            if name in sent_names:
                block, plan = graph.block(call.block), candidate.block(call.block)
                value = block.values()[block.outputs[slot]]
                value = replace(value, name=name, differentiable=value.differentiable and name in reached)
                values[name] = localize_value(value, plan.outputs[slot], context)

    def of(names: tuple[str, ...]) -> tuple[Value, ...]:
        return tuple(values[name] for name in names)

    return tuple(LoweredChunk(chunk.calls, of(chunk.receives), of(chunk.sends)) for chunk in staged.chunks)


def _lower_block(block: Block, candidate: Candidate, batch: int, uneven: bool, dump: Dump | None) -> LoweredBlock:
    plan = candidate.block(block.name)
    context = Context(candidate.mesh, plan, candidate.precision, batch, candidate.micro_batches, uneven)
    state = BlockState(block, captured_placements(block, plan))
    for number, each in enumerate(passes(), 1):
        try:
            state = each.run(state, context)
        except PlanError as error:
            raise PlanError(f"block {block.name}: {error}") from None
        verify(state, context, each.name)
        if dump is not None:
            dump(f"{block.name}.{number:02d}.{each.name}", str(state))
    return LoweredBlock(state, _stored_parameters(block, candidate), plan.zero, plan.recompute)


def captured_placements(block: Block, plan: BlockPlan) -> dict[str, Placements]:
    """Return the placement in which the plan produces each value, before any conversion."""
    results = {each.node: each.results for each in plan.nodes}
    if results.keys() != {node.name for node in block.nodes}:
        raise PlanError(f"block {block.name}: the plan's operations are not those of the graph; plan the model again")
    out = {value.name: where for value, where in zip(block.inputs, plan.inputs, strict=True)}
    out.update((p.value.name, where) for p, where in zip(block.parameters, plan.parameters, strict=True))
    for node in block.nodes:
        out.update((value.name, where) for value, where in zip(node.outputs, results[node.name], strict=True))
    return out


def _stored_parameters(block: Block, candidate: Candidate) -> tuple[StoredParameter, ...]:
    out = []
    for parameter, where in zip(block.parameters, candidate.block(block.name).parameters, strict=True):
        shape = tuple(size for size in parameter.value.shape if isinstance(size, int))
        assert len(shape) == len(parameter.value.shape), f"{parameter.path} depends on the batch"
        dtype = stored_dtype(parameter.value.dtype, candidate.precision)
        placements = _placement_texts(where, candidate, model=True)
        out.append(StoredParameter(parameter.path, shape, dtype, placements, parameter.trainable, parameter.buffer))
    return tuple(out)


def _placement_texts(placements: Placements, candidate: Candidate, model: bool = False) -> tuple[tuple[str, str], ...]:
    """Return (axis, placement) for each axis on which it is neither Replicate nor Invariant, the default."""
    pairs = zip(candidate.mesh.names, placements, strict=True)
    return tuple(
        (axis, str(where))
        for axis, where in pairs
        if not isinstance(where, Replicate | Invariant) and not (model and axis == DATA_AXIS)
    )


def _input_placements(graph: Graph, candidate: Candidate) -> dict[str, Placements]:
    """Return the placement of each input of the batch at the start of the program. One that nothing reads is sharded with the
    batch, whose size on a rank it may tell."""
    axes = candidate.mesh.names

    def unread(value: Value) -> Placements:
        batched = bool(value.shape) and has_batch(value.shape[0])
        return tuple(Shard(0) if axis == DATA_AXIS and batched else Replicate() for axis in axes)

    out = {value.name: unread(value) for value in graph.inputs}
    for call in graph.calls:
        for name, where in zip(call.inputs, candidate.block(call.block).inputs, strict=True):
            if name in out:
                out[name] = where
    return out
