"""The pipeline stages as a table: the modules of each model chunk, its state sharding, and what it sends to the next chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.cli.console import Console, size
from autopar.ir import dims
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import crossing_values
from autopar.ir.placement import local_shape
from autopar.ir.plan_file.plan_file import Plan
from autopar.schedules.placement import chunks_of_stages


def stage_table(plan: Plan, console: Console) -> None:
    """A row for each model chunk of each pipeline stage. Nothing without a pipeline."""
    pipeline = plan.candidate.pipeline
    if pipeline.stages == 1:
        return
    calls_of = chunk_calls(plan.graph, pipeline)
    sends = (*crossing_values(plan.graph, calls_of, pipeline.repeated), ())
    rows = []
    for stage, chunks in enumerate(chunks_of_stages(pipeline)):
        for chunk in chunks:
            blocks = [plan.candidate.block(plan.graph.calls[index].block) for index in calls_of[chunk]]
            state = sorted({f"ZeRO-{block.zero}" if block.zero else "replicated" for block in blocks})
            recomputing = sum(block.recompute or bool(block.recompute_nodes or block.recompute_conversions) for block in blocks)
            count = f"{recomputing} of {len(blocks)}"
            rows.append((stage, chunk, _modules(plan, calls_of[chunk]), ", ".join(state), count, _sent(plan, sends[chunk])))
    header = ("stage", "model chunk", "modules", "state", "blocks with recomputation", "sends per micro-batch")
    console.table("Pipeline stages", header, rows)
    if pipeline.repeated:
        console.text(f"computed on every stage instead of sent: {', '.join(pipeline.repeated)}")
    if pipeline.weight_versions > 1:
        console.text("gradients are those of the weights before the last update: staleness 1 (PipeDream-2BW, arXiv 2006.09503)")


def _modules(plan: Plan, calls: tuple[int, ...]) -> str:
    names = list(dict.fromkeys(plan.graph.calls[index].prefix or plan.graph.calls[index].block for index in calls))
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} .. {names[-2]}, {names[-1]}"


def _sent(plan: Plan, names: tuple[str, ...]) -> str:
    """``hidden 4.0 MiB``: the values with the bytes that one device sends."""
    return ", ".join(f"{name} {size(count)}" for name, count in _sizes(plan, names)) or "-"


def _sizes(plan: Plan, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    candidate = plan.candidate
    from autopar.cost_models.tensors.sizes import value_bytes

    for name in names:
        call = next(call for call in plan.graph.calls if name in call.outputs)
        block, slot = plan.graph.block(call.block), call.outputs.index(name)
        value, at = block.values()[block.outputs[slot]], candidate.block(call.block).outputs[slot]
        micro_batch_shape = tuple(dims.size_at(dim, candidate.micro_batch) for dim in value.shape)
        yield name, value_bytes(replace(value, shape=local_shape(micro_batch_shape, at, candidate.mesh.sizes)), 1)
