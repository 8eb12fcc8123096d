"""The stages of a pipeline as a table: what is on each, and what goes from each chunk to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.cli.output import Output, size
from autopar.ir import dims
from autopar.ir.chunks import chunk_calls, chunks_of_ranks
from autopar.ir.placement import local_shape
from autopar.ir.planfile import Plan
from autopar.ir.stages import crossing


def stages(plan: Plan, output: Output) -> None:
    """Nothing, where there is one stage."""
    pipeline = plan.candidate.pipeline
    if pipeline.stages == 1:
        return
    parts = chunk_calls(plan.graph, pipeline)
    crosses = (*crossing(plan.graph, parts, pipeline.repeated), ())
    rows = []
    for stage, mine in enumerate(chunks_of_ranks(pipeline)):
        for chunk in mine:
            blocks = [plan.candidate.block(plan.graph.calls[index].block) for index in parts[chunk]]
            kept = sorted({f"ZeRO-{block.zero}" if block.zero else "whole" for block in blocks})
            again = sum(block.recompute or bool(block.again) or bool(block.again_arcs) for block in blocks)
            rows.append(
                (
                    stage,
                    chunk,
                    _modules(plan, parts[chunk]),
                    ", ".join(kept),
                    f"{again} of {len(blocks)}",
                    _sent(plan, crosses[chunk]),
                )
            )
    output.table("Stages", ("stage", "chunk", "modules", "state", "recomputed", "sends per micro-batch"), rows)
    if pipeline.repeated:
        output.text(f"made by every stage for itself: {', '.join(pipeline.repeated)}")
    if pipeline.weight_versions > 1:
        output.text("gradients are those of the weights before the last update: staleness 1 (PipeDream-2BW, arXiv 2006.09503)")


def _modules(plan: Plan, calls: tuple[int, ...]) -> str:
    names = list(dict.fromkeys(plan.graph.calls[index].prefix or plan.graph.calls[index].block for index in calls))
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} .. {names[-2]}, {names[-1]}"


def _sent(plan: Plan, names: tuple[str, ...]) -> str:
    """``hidden 4.0 MiB``: of one device."""
    return ", ".join(f"{name} {size(count)}" for name, count in _sizes(plan, names)) or "-"


def _sizes(plan: Plan, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    candidate = plan.candidate
    from autopar.cost_models.sizes import value_bytes

    for name in names:
        call = next(call for call in plan.graph.calls if name in call.outputs)
        block, slot = plan.graph.block(call.block), call.outputs.index(name)
        value, at = block.values()[block.outputs[slot]], candidate.block(call.block).outputs[slot]
        whole = tuple(dims.value(dim, candidate.micro_batch) for dim in value.shape)
        yield name, value_bytes(replace(value, shape=local_shape(whole, at, candidate.mesh.sizes)), 1)
