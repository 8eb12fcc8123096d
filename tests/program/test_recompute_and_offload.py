"""Drawn selective recomputation and offload: loss, gradients and buffers are those of one process."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from program.test_trains import CLASSES, GRAPHS, MESHES, compare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_steps
from support.oracles.interpret_graph import make_batch, make_state
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_replays
from support.plans.mesh import mesh_of
from torch import nn

from autopar.capture import capture
from autopar.program.build import program_text


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", GRAPHS)
def test_any_selection_of_values(model: str, mesh: str, ranks: RankPool) -> None:
    graph = GRAPHS[model]()
    state, batch = make_state(graph), make_batch(graph, CLASSES)
    texts = []
    for seed, share in enumerate((0.3, 0.6, 0.9, 1.0)):
        candidate = drawn_candidate(graph, mesh_of(**MESHES[mesh]), seed, zero=(seed + 3) % 4, wild=0.2 * seed)
        texts.append(program_text(graph, with_replays(graph, candidate, seed, share)))
    results = ranks.run(train_steps, [(text, state, batch) for text in texts])
    for found in (results[0], results[3]):
        for one, text in zip(found, texts, strict=True):
            compare(one, graph, state, batch, 1e-9, text)


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).max(dim=-1).values.sum()


def test_what_nothing_reads_has_no_name_to_offload() -> None:
    """The backward of ``max`` saves indices that the program never names."""
    graph = capture(Largest(), (), {"x": torch.randn(4, 8)})
    candidate = drawn_candidate(graph, mesh_of(dp=2), 0)
    plans = []
    for plan in candidate.blocks:
        nodes = {node.name: node for node in graph.block(plan.block).nodes}
        pairs = [pair for each in plan.nodes for pair in zip(nodes[each.node].outputs, each.results, strict=True)]
        plans.append(replace(plan, offload=tuple((value.name, at) for value, at in pairs)))
    text = program_text(graph, replace(candidate, blocks=tuple(plans)))
    offloaded = set(re.findall(r"recompute\.offload\((\w+)\)", text))
    assert offloaded
    assert all(re.search(rf"^\s+(\w+, )*{name}(, \w+)* = ", text, re.MULTILINE) for name in offloaded), text
