"""The tables of a plan: the pipeline stages (the modules of each model chunk, its state sharding, and what it sends to the next
chunk), the experts of each layer by rank, and the baselines (DDP, FSDP, Megatron recipes)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.cli.console import Console, seconds, size
from autopar.cost_models.hardware.workload import ExpertLoad, parse_document_lengths, parse_expert_load
from autopar.ir import dims
from autopar.ir.graph import Node
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import crossing_values
from autopar.ir.placement import Shard, local_shape
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.document import Baseline
from autopar.ir.plan_file.plan_file import Plan
from autopar.operations.attention import DOCUMENTS
from autopar.operations.table import operation
from autopar.schedules.pipeline_schedule import chunks_of_stages


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


def document_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row where attention is within documents, which says what it is priced at."""
    if not any(node.op == DOCUMENTS for block in plan.graph.blocks for node in block.nodes):
        return []
    tokens = parse_document_lengths(plan.document.cluster.description.get("document_lengths", {}), "the plan").tokens
    price = f"documents of {tokens:,.0f} tokens (mean over tokens)" if tokens else "one document a sequence: say --lengths"
    return [("documents", f"attention within documents, priced for {price}")]


def expert_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row for each distinct layer: ``experts | DecoderLayer.mlp.experts: 8 on ep=4, 16,384 routed tokens per rank ...``."""
    load = parse_expert_load(plan.document.cluster.description.get("expert_load", {}), "the plan")
    return [
        ("experts", f"{block.name}.{node.module or node.name}: {_layer_text(plan.candidate, block.name, node, sizes, load)}")
        for block in plan.graph.blocks
        for sizes in [{name: value.shape for name, value in block.values().items()}]
        for node in block.nodes
        if operation(node.op).experts
    ]


def _layer_text(candidate: Candidate, block: str, node: Node, shapes: dict[str, dims.Shape], load: ExpertLoad) -> str:
    """Return the ranks of one layer's experts, and the routed tokens (token, expert pairs) of one rank."""
    plan = next(each for each in candidate.block(block).nodes if each.node == node.name)
    tokens, matrices = plan.operands[0], plan.operands[3]
    names = node.operands()
    experts = dims.size_at(shapes[names[3]][0], candidate.micro_batch)
    routed = float(dims.numel(shapes[names[1]], candidate.micro_batch))
    expert_ranks, tensor_ranks = 1, 1
    axes: list[str] = []
    for axis, token, matrix in zip(candidate.mesh.axes, tokens, matrices, strict=True):
        by_expert = isinstance(matrix, Shard) and matrix.dim == 0
        if by_expert or isinstance(token, Shard):
            routed /= axis.size
        tensor_ranks *= axis.size if isinstance(matrix, Shard) and not by_expert else 1
        if by_expert and axis.size > 1:
            expert_ranks, axes = expert_ranks * axis.size, [*axes, f"{axis.name}={axis.size}"]
    per_rank = f"{routed:,.0f} routed tokens per rank and micro-batch"
    if expert_ranks == 1:
        sharding = f"each sharded {tensor_ranks} ways" if tensor_ranks > 1 else "replicated"
        return f"{experts} on every rank, {sharding}, {per_rank}"
    imbalance = load.imbalance(experts, expert_ranks)
    balance = "balanced" if imbalance == 1 else f"busiest rank {imbalance * routed:,.0f}"
    return f"{experts} on {' x '.join(axes)}, {per_rank} ({balance})"


def baseline_table(
    baselines: Mapping[str, Baseline | None], step_seconds: float | None, peak_bytes: int | None, console: Console
) -> None:
    """Baselines beside the plan, whose step time and peak memory are given."""
    rows = [("this plan", "our programs", seconds(step_seconds), "1", "", "", size(peak_bytes), "")]
    lines = []
    for key, each in baselines.items():
        if each is None:
            continue
        title = each.title or key.upper()
        ratio = f"{each.step_seconds / step_seconds:.3g}" if each.step_seconds and step_seconds and each.fits else "-"
        rows.append(
            (
                title,
                each.software or "our programs",
                seconds(each.step_seconds) if each.fits else "-",
                ratio,
                seconds(each.own_step_seconds) if each.software else "",
                seconds(each.measured_seconds) if each.measured_seconds else "",
                size(each.peak_memory_bytes),
                each.memory,
            )
        )
        lines += _lines(title, each)
    header = ("", "software", "step", "relative to this plan", "by our programs", "measured", "peak memory", "memory")
    console.table("Baselines: what people write by hand, each on the software that it is run on", header, rows)
    for line in lines:
        console.text(line)


def _lines(title: str, each: Baseline) -> list[str]:
    """The configuration in words, what is wrong with it, what was measured of it, and why it is faster than the plan."""
    short = f"out of memory: {size(each.shortfall_bytes)} short" if each.shortfall_bytes else each.problem
    said = [each.configuration, short, f"published: {each.measured}" if each.measured else ""]
    lines = [f"{title}: {'; '.join(filter(None, said))}"] if any(said) else []
    return [*lines, *([f"  {each.reason}"] if each.reason else [])]
