"""Model chunks, run one after another with only what they receive, compute the loss; and no unneeded value is sent."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.harness.end_to_end import Prepared, prepare
from support.oracles.interpret_graph import run_graph, run_nodes
from support.plans.pipeline_plans import pipeline_candidate, with_split_block

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.pipeline.stage_values import check_chunk_borders, crossing_values, repeatable_values
from autopar.ir.plan import Pipeline
from autopar.passes.split_stages import ChunkedGraph, split_stages


@cache
def prepared(name: str) -> Prepared:
    return with_split_block(prepare("convnet"), "Main", (2, 3, 6)) if name == "convnet" else prepare(name)


def run_chunks(staged: ChunkedGraph, case: Prepared) -> torch.Tensor:
    """Each chunk sees the batch and what it receives."""
    graph, sent = staged.graph, dict[str, torch.Tensor]()
    for chunk in staged.chunks:
        assert set(chunk.receives) == set(sent)
        known = case.batch | sent
        for call in chunk.calls:
            block = graph.block(call.block)
            tensors = {value.name: known[name] for value, name in zip(block.inputs, call.inputs, strict=True)}
            tensors |= {p.value.name: case.state[name] for p, name in zip(block.parameters, call.parameters, strict=True)}
            run_nodes(block, tensors, graph.batch)
            known |= {name: tensors[result] for name, result in zip(call.outputs, block.outputs, strict=True)}
        sent = {name: known[name] for name in chunk.sends}
    return sent[graph.loss]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "encoder_decoder", "convnet"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("repeat", [False, True])
def test_chunks_make_the_loss(name: str, stages: int, repeat: bool) -> None:
    case = prepared(name)
    candidate = pipeline_candidate(case, {}, Pipeline(stages), 1)
    if not repeat:
        candidate = replace(candidate, pipeline=replace(candidate.pipeline, repeated=()))
    staged = split_stages(case.graph, candidate)
    assert torch.equal(run_chunks(staged, case), run_graph(case.graph, case.state, case.batch))
    for before, after in zip(staged.chunks, staged.chunks[1:], strict=False):
        assert before.sends == after.receives
        assert not set(before.sends) & set(candidate.pipeline.repeated)
    if name == "llama" and stages == 2:
        assert [len(chunk.receives) for chunk in staged.chunks] == [0, 1 if repeat else 3]


def test_a_value_passes_through() -> None:
    graph = prepared("encoder_decoder").graph
    memory = graph.calls[2].outputs[0]
    cuts = crossing_values(graph, [[0, 1], [2], [3], [4, 5]])
    assert [memory in names for names in cuts] == [False, True, True]


def test_what_cannot_be_repeated() -> None:
    case = prepared("gpt2")
    candidate = pipeline_candidate(case, {}, Pipeline(2), 2)
    hidden = case.graph.calls[0].outputs[0]
    assert hidden not in repeatable_values(case.graph)
    with pytest.raises(PlanError, match=f"{hidden} cannot be repeated by every stage"):
        split_stages(case.graph, replace(candidate, pipeline=replace(candidate.pipeline, repeated=(hidden,))))


def test_random_values_are_not_repeated() -> None:
    """A mask that is drawn has to be the same everywhere."""
    graph = prepared("llama").graph
    block = graph.block("Prologue")
    tables = set(repeatable_values(graph))
    cos = next(node for node in block.nodes if node.op.startswith("aten.cos"))
    drawn = replace(cos, op="ap.dropout", kwargs=(("p", 0.5),))
    nodes = tuple(drawn if node is cos else node for node in block.nodes)
    changed = replace(graph, blocks=tuple(replace(block, nodes=nodes) if each is block else each for each in graph.blocks))
    assert len(tables) == 2 and len(repeatable_values(changed)) == 1


def written(graph: Graph) -> Graph:
    """Llama whose prologue writes the frequencies that both chunks then read."""
    block = graph.block("Prologue")
    buffer = next(parameter for parameter in block.parameters if parameter.buffer)
    changed = replace(block, updates=((buffer.value.name, buffer.value.name),))
    layer = graph.block("LlamaDecoderLayer")
    reads = replace(layer, parameters=(*layer.parameters, buffer))
    name = next(n for p, n in zip(block.parameters, graph.calls[0].parameters, strict=True) if p is buffer)
    calls = tuple(
        replace(call, parameters=(*call.parameters, name)) if call.block == layer.name else call for call in graph.calls
    )
    blocks = tuple({block.name: changed, layer.name: reads}.get(each.name, each) for each in graph.blocks)
    return replace(graph, blocks=blocks, calls=calls)


def test_a_buffer_that_another_chunk_writes() -> None:
    graph = written(prepared("llama").graph)
    with pytest.raises(
        PlanError, match=r"inv_freq is written by Prologue and used by both Prologue \(chunk 0\) and model.layers.1"
    ):
        check_chunk_borders(graph, [[0, 1], [2, 3]])
