"""The calls of the graph that make up each model chunk of a pipeline."""

from __future__ import annotations

from itertools import accumulate
from re import compile as pattern

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Pipeline

_NUMBER = pattern(r"^(.*?(?:^|\.)\d+)(?:\.|$)")


def chunk_calls(graph: Graph, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """The calls (indices of `graph.calls`) of every chunk, in the model's order.

    `pipeline.cuts` or `pipeline.layers` say it. Without both, layers are distributed evenly. Where they do not divide, the last
    chunk gets one layer less (it has the head), then the first (the embedding), then the next ones inwards: 126 layers on 16
    stages are 7, 8, ..., 8, 7. Calls before the first layer go to the first chunk, all others to the layer before them. Where
    there are fewer layers than chunks, the head is a chunk by itself, and then the embedding (Megatron's
    ``account_for_loss_in_pipeline_split`` and ``account_for_embedding_in_pipeline_split``): 94 layers make 96 chunks. PlanError
    where there are still too few.
    """
    parts = pipeline.stages * pipeline.virtual
    if parts == 1:
        return (tuple(range(len(graph.calls))),)
    if pipeline.cuts:
        return _between_cuts(graph, pipeline.cuts, parts)
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


def _between_cuts(graph: Graph, cuts: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], ...]:
    if len(cuts) != parts - 1:
        raise PlanError(f"the pipeline's {len(cuts)} cuts do not make {parts} chunks: write {parts - 1} of them")
    edges = [0, *cuts, len(graph.calls)]
    if any(first >= second for first, second in zip(edges, edges[1:], strict=False)):
        raise PlanError(f"the cuts {cuts} must increase, within the {len(graph.calls)} calls of {graph.name}")
    return tuple(tuple(range(first, second)) for first, second in zip(edges, edges[1:], strict=False))


def _ends_first(count: int) -> list[int]:
    """The numbers below `count`: the last, the first, the last but one, the second, ..."""
    return [count - 1 - place // 2 if place % 2 == 0 else place // 2 for place in range(count)]


def layer_calls(graph: Graph) -> tuple[list[int], list[list[int]], list[int]]:
    """The calls before the first layer, those of each layer (with what follows it before the next one), and those after the last.

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
