"""Which calls make up each chunk of a pipeline, and which chunks sit on which rank."""

from __future__ import annotations

from itertools import accumulate
from re import compile as pattern

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Pipeline

SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1", "zbv", "dualpipev")
"""Names of schedules that are built; any other one comes with its text."""

V_SHAPED = ("zbv", "dualpipev")
"""Those of two chunks a rank whose second ones go back from the last rank to the first."""

_NUMBER = pattern(r"^(.*?(?:^|\.)\d+)(?:\.|$)")
_CHUNK = pattern(r"^(\d+)[A-Z]")


def chunk_calls(graph: Graph, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """The calls (indices of `graph.calls`) of every chunk, in the model's order.

    `pipeline.cuts` says it, or `pipeline.layers`. Without both, layers are dealt evenly. Where that does not go up, the last
    chunk gets one less (it has the head), then the first (the embedding), then the next ones inwards: 126 layers on 16 stages are
    7, 8, ..., 8, 7. What precedes the first layer goes to the first chunk, everything else to the layer before it. Where layers
    lack, the head is a chunk by itself, and then the embedding (Megatron's ``account_for_loss_in_pipeline_split`` and
    ``account_for_embedding_in_pipeline_split``): 94 layers make 96 chunks. PlanError where that does not suffice.
    """
    parts = pipeline.stages * pipeline.virtual
    if parts == 1:
        return (tuple(range(len(graph.calls))),)
    if pipeline.cuts:
        return _cut(graph, pipeline.cuts, parts)
    before, layers, after = layer_calls(graph)
    if pipeline.layers and (len(pipeline.layers) != parts or sum(pipeline.layers) != len(layers) or min(pipeline.layers) < 1):
        raise PlanError(f"the pipeline's layers {pipeline.layers} are not {len(layers)} layers in {parts} chunks")
    if len(layers) + bool(before) + bool(after) < parts:
        raise PlanError(
            f"{graph.name} has {len(layers)} layers, {pipeline.stages} stages of {pipeline.virtual} chunks need {parts}: "
            "take fewer stages"
        )
    missing = max(0, parts - len(layers))
    head_alone = bool(missing and after)
    embedding_alone = missing > head_alone
    sizes = list(pipeline.layers) or [len(layers) // (parts - missing) + 1] * (parts - missing)
    for place in () if pipeline.layers else _ends_first(len(sizes))[: len(sizes) - len(layers) % len(sizes)]:
        sizes[place] -= 1
    ends = list(accumulate(sizes))
    out = [[index for layer in layers[end - size : end] for index in layer] for size, end in zip(sizes, ends, strict=True)]
    if not embedding_alone:
        out[0] = before + out[0]
    if not head_alone:
        out[-1] = out[-1] + after
    return tuple(map(tuple, [before] * embedding_alone + out + [after] * head_alone))


def _cut(graph: Graph, cuts: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], ...]:
    if len(cuts) != parts - 1:
        raise PlanError(f"the pipeline's {len(cuts)} cuts do not make {parts} chunks: write {parts - 1} of them")
    edges = [0, *cuts, len(graph.calls)]
    if any(first >= second for first, second in zip(edges, edges[1:], strict=False)):
        raise PlanError(f"the cuts {cuts} must increase, within the {len(graph.calls)} calls of {graph.name}")
    return tuple(tuple(range(first, second)) for first, second in zip(edges, edges[1:], strict=False))


def _ends_first(count: int) -> list[int]:
    """Last, first, last but one, second ..."""
    return [count - 1 - place // 2 if place % 2 == 0 else place // 2 for place in range(count)]


def layer_calls(graph: Graph) -> tuple[list[int], list[list[int]], list[int]]:
    """The calls before the first layer, those of each layer with what follows it before the next, and those behind the last.

    Calls of one numbered module (``model.layers.3``, also its parts) are one layer; without numbers each call is one.
    """
    found = [_NUMBER.match(call.prefix) for call in graph.calls]
    names = [match[1] if match else "" for match in found]
    if len({name for name in names if name}) < 2:
        return [], [[index] for index in range(len(graph.calls))], []
    first = next(index for index, name in enumerate(names) if name)
    end = len(names) - next(index for index, name in enumerate(reversed(names)) if name)
    layers: list[list[int]] = []
    current = ""
    for index in range(first, end):
        if names[index] and names[index] != current:
            layers.append([])
            current = names[index]
        layers[-1].append(index)
    return list(range(first)), layers, list(range(end, len(names)))


def check_schedule(pipeline: Pipeline, micro_batches: int) -> None:
    """PlanError where a name and these numbers make no schedule."""
    name, stages, virtual = pipeline.schedule, pipeline.stages, pipeline.virtual
    if pipeline.actions:
        return
    if name not in SCHEDULES:
        raise PlanError(f"no schedule {name!r}: write one of {', '.join(SCHEDULES)}, or its actions")
    if name in V_SHAPED and virtual != 2:
        raise PlanError(f"{name} has 2 chunks a stage, not {virtual}: write virtual=2")
    if name == "dualpipev" and micro_batches < 2 * stages:
        raise PlanError(f"dualpipev takes at least {2 * stages} micro-batches on {stages} stages, not {micro_batches}")


def chunks_of_ranks(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank, in the model's order: chunk c of p * v is on rank ``c mod p``; V-shaped, the second half of them
    goes back. A schedule's own text says it by itself."""
    stages, virtual = pipeline.stages, pipeline.virtual
    if pipeline.actions:
        found = (map(_CHUNK.match, line.split()) for line in pipeline.actions.splitlines() if line.strip())
        return tuple(tuple(sorted({int(match[1]) for match in matches if match})) for matches in found)
    if pipeline.schedule in V_SHAPED and virtual == 2:
        return tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))
    return tuple(tuple(range(rank, stages * virtual, stages)) for rank in range(stages))


def rank_of_chunks(pipeline: Pipeline) -> tuple[int, ...]:
    """The rank of every chunk, in the model's order."""
    found = {chunk: rank for rank, mine in enumerate(chunks_of_ranks(pipeline)) for chunk in mine}
    return tuple(found[chunk] for chunk in range(pipeline.stages * pipeline.virtual))
