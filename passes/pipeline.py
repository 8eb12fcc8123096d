"""The compiler's middle: one visible list of passes, checked after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Block, Graph, Value
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Invariant, Placements, Replicate
from autopar.ir.plan import BlockPlan, Candidate
from autopar.ir.schedule import Schedule
from autopar.ir.verify import verify_pipeline
from autopar.passes.base import Context, Pass, Stage
from autopar.passes.bucket_conversions import BucketConversions
from autopar.passes.cast_parameters import CastParameters, stored_dtype
from autopar.passes.dead_code import DeadCode
from autopar.passes.dispatch_behind import DispatchBehind
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.localize import Localize, localize_value
from autopar.passes.lowered import Lowered, LoweredBlock, LoweredChunk, LoweredOutput, Spec
from autopar.passes.overlap import Overlap
from autopar.passes.readable_names import ReadableNames
from autopar.passes.replay import Replay
from autopar.passes.split_stages import Staged, split_stages
from autopar.passes.split_totals import split_totals
from autopar.passes.verify import verify
from autopar.schedules.build import schedule_of
from autopar.schedules.communicate import with_communication
from autopar.schedules.two_versions import window, with_transfers

Dump = Callable[[str, str], None]
"""Takes the name of a stage, ``LlamaDecoderLayer.03.overlap``, and its text."""


def passes() -> tuple[Pass, ...]:
    """All rewrites in order."""
    return (
        InsertConversions(),
        Replay(),
        Localize(),
        DeadCode(),
        CastParameters(),
        BucketConversions(),
        DispatchBehind(),
        Overlap(),
        ReadableNames(),
    )


def lower(graph: Graph, candidate: Candidate, dump: Dump | None = None) -> Lowered:
    """The program of one rank. PlanError where the candidate does not fit the graph; `dump` gets the text of every stage."""
    data_ranks = candidate.mesh.size_of(DATA_AXIS)
    parts = data_ranks * candidate.micro_batches
    if candidate.batch % parts:
        times = f" and {candidate.micro_batches} micro-batches" if candidate.micro_batches > 1 else ""
        raise PlanError(f"a batch of {candidate.batch} does not divide over dp={data_ranks}{times}")
    split = split_totals(graph, candidate)
    staged = split_stages(split.graph, split.candidate)
    graph, candidate = staged.graph, staged.candidate
    piped = candidate.pipeline.stages > 1
    schedule = _schedule(staged) if piped else None
    blocks = tuple(_lower_block(block, candidate, dump) for block in graph.blocks)
    placements = _input_placements(graph, candidate)
    context = Context(candidate.mesh, candidate.blocks[0], candidate.precision, candidate.batch // parts)
    return Lowered(
        name=graph.name,
        mesh=candidate.mesh,
        precision=candidate.precision,
        batch=candidate.batch // parts,
        inputs=tuple(localize_value(value, placements[value.name], context) for value in graph.inputs),
        input_placements=tuple((value.name, _texts(placements[value.name], candidate)) for value in graph.inputs),
        blocks=blocks,
        calls=graph.calls,
        loss=graph.loss,
        fingerprint=graph.fingerprint,
        micro_batches=candidate.micro_batches,
        zero_group=candidate.zero_group,
        totals=split.calls,
        total_ops=split.ops,
        chunks=_chunks(staged, context),
        schedule=schedule,
        weight_versions=candidate.pipeline.weight_versions,
        outputs=_outputs(graph, candidate),
        interface=graph.interface,
    )


def _outputs(graph: Graph, candidate: Candidate) -> tuple[LoweredOutput, ...]:
    """Where each output is when the program ends."""
    places = {
        name: where for call in graph.calls for name, where in zip(call.outputs, candidate.block(call.block).outputs, strict=True)
    }
    return tuple(LoweredOutput(each.path, each.value, _texts(places[each.value], candidate)) for each in graph.outputs)


def _schedule(staged: Staged) -> Schedule:
    """With communication. PlanError where two versions of weights cannot be."""
    candidate = staged.candidate
    pipeline = candidate.pipeline
    if pipeline.weight_versions == 1:
        return with_communication(schedule_of(pipeline, candidate.micro_batches), _zeros(staged))
    verify_pipeline(staged.graph, candidate)
    return with_transfers(window(pipeline.stages, candidate.micro_batches))


def _zeros(staged: Staged) -> tuple[int, ...] | None:
    """How each chunk shards its state: 1 or 2 where some of its blocks gather once a step, 3 where all do each time."""
    if staged.candidate.mesh.size_of(DATA_AXIS) == 1:
        return None
    plans = {plan.block: plan for plan in staged.candidate.blocks}
    out = []
    for chunk in staged.chunks:
        found = {plans[call.block].zero for call in chunk.calls if call.parameters}
        out.append(max(found & {1, 2}, default=max(found, default=0)))
    return tuple(out)


def _chunks(staged: Staged, context: Context) -> tuple[LoweredChunk, ...]:
    """With the local shapes of what goes between them."""
    graph, candidate = staged.graph, staged.candidate
    values: dict[str, Value] = {}
    wanted = {name for chunk in staged.chunks for name in (*chunk.receives, *chunk.sends)}
    for call in graph.calls:
        for slot, name in enumerate(call.outputs):
            if name in wanted:
                block, plan = graph.block(call.block), candidate.block(call.block)
                value = replace(block.values()[block.outputs[slot]], name=name)
                values[name] = localize_value(value, plan.outputs[slot], context)

    def of(names: tuple[str, ...]) -> tuple[Value, ...]:
        return tuple(values[name] for name in names)

    return tuple(LoweredChunk(chunk.calls, of(chunk.receives), of(chunk.sends)) for chunk in staged.chunks)


def _lower_block(block: Block, candidate: Candidate, dump: Dump | None) -> LoweredBlock:
    mesh, plan = candidate.mesh, candidate.block(block.name)
    batch = candidate.micro_batch // mesh.size_of(DATA_AXIS)
    context = Context(mesh, plan, candidate.precision, batch, candidate.micro_batches)
    stage = Stage(block, captured_placements(block, plan))
    for number, each in enumerate(passes(), 1):
        try:
            stage = each.run(stage, context)
        except PlanError as error:
            raise PlanError(f"block {block.name}: {error}") from None
        verify(stage, context, each.name)
        if dump is not None:
            dump(f"{block.name}.{number:02d}.{each.name}", str(stage))
    return LoweredBlock(stage.block, _specs(block, candidate), plan.zero, plan.recompute, stage.again, stage.offload)


def captured_placements(block: Block, plan: BlockPlan) -> dict[str, Placements]:
    """Where each value is produced."""
    results = {each.node: each.results for each in plan.nodes}
    if results.keys() != {node.name for node in block.nodes}:
        raise PlanError(f"block {block.name}: the plan's ops are not those of the graph; plan the model again")
    out = {value.name: where for value, where in zip(block.inputs, plan.inputs, strict=True)}
    out.update((p.value.name, where) for p, where in zip(block.parameters, plan.parameters, strict=True))
    for node in block.nodes:
        out.update((value.name, where) for value, where in zip(node.outputs, results[node.name], strict=True))
    return out


def _specs(block: Block, candidate: Candidate) -> tuple[Spec, ...]:
    def spec(index: int) -> Spec:
        parameter, where = block.parameters[index], candidate.block(block.name).parameters[index]
        shape = tuple(size for size in parameter.value.shape if isinstance(size, int))
        assert len(shape) == len(parameter.value.shape), f"{parameter.path} depends on the batch"
        dtype = stored_dtype(parameter.value.dtype, candidate.precision)
        return Spec(parameter.path, shape, dtype, _texts(where, candidate, model=True), parameter.trainable, parameter.buffer)

    return tuple(map(spec, range(len(block.parameters))))


def _texts(placements: Placements, candidate: Candidate, model: bool = False) -> tuple[tuple[str, str], ...]:
    """Axis and placement where it is not the default: replicated."""
    pairs = zip(candidate.mesh.names, placements, strict=True)
    return tuple(
        (axis, str(where))
        for axis, where in pairs
        if not isinstance(where, Replicate | Invariant) and not (model and axis == DATA_AXIS)
    )


def _input_placements(graph: Graph, candidate: Candidate) -> dict[str, Placements]:
    """Where each input of the batch is when the program begins; one that nobody reads arrives whole."""
    whole: Placements = (Replicate(),) * len(candidate.mesh.axes)
    out = {value.name: whole for value in graph.inputs}
    for call in graph.calls:
        for name, where in zip(call.inputs, candidate.block(call.block).inputs, strict=True):
            if name in out:
                out[name] = where
    return out
