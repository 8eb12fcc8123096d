"""A block that is split into several computes the same, wherever it is split."""

from __future__ import annotations

import pytest
import torch
from support.harness.end_to_end import prepare
from support.oracles.interpret_graph import run_graph

from autopar.errors import PlanError
from autopar.ir.pipeline.split_blocks import live_values, single_tensor_cuts, split_block


@pytest.mark.parametrize("name", ["convnet", "llama", "gpt2"])
def test_the_loss_stays(name: str) -> None:
    prepared = prepare(name)
    graph, state, batch = prepared.graph, prepared.state, prepared.batch
    expected = run_graph(graph, state, batch)
    for block in graph.blocks:
        count = len(block.nodes)
        if count < 4:
            continue
        for places in ([1, count // 2, count - 1], *([[1], [count // 2], [count - 1]] if name == "convnet" else [])):
            found = split_block(graph, block.name, places)
            assert len(found.blocks) == len(graph.blocks) + len(places)
            assert found.count(f"{block.name}_1") == graph.count(block.name)
            assert torch.equal(run_graph(found, state, batch), expected), (block.name, places)
            assert found.parameters().keys() == graph.parameters().keys()


def test_at_single_tensor_cuts_one_value_crosses() -> None:
    graph = prepare("llama").graph
    block = graph.block("LlamaDecoderLayer")
    crossing = live_values(block)
    places = single_tensor_cuts(block)
    assert places and all(len(crossing[place - 1]) == 1 for place in places)
    parts = split_block(graph, block.name, [places[len(places) // 2]]).blocks
    first = next(part for part in parts if part.name == "LlamaDecoderLayer_1")
    assert len(first.outputs) == 1


def test_places_are_inside() -> None:
    graph = prepare("mlp").graph
    for places in ([0], [99], [3, 2], [2, 2]):
        with pytest.raises(PlanError, match="give increasing places inside"):
            split_block(graph, "Main", places)
