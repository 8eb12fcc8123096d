"""Candidates drawn at random are accepted, round-trip exactly, and are refused after each of many small edits."""

from __future__ import annotations

import dataclasses

import pytest
from support.blocks import gpt2_graph
from support.candidates import drawn_candidate, mesh_of

from autopar.errors import PlanError
from autopar.ir import planfile
from autopar.ir.document import ClusterInfo, ModelInfo, Parallelism
from autopar.ir.graph import Graph
from autopar.ir.placement import Partial, Replicate
from autopar.ir.plan import Candidate
from autopar.ir.verify import verify_candidate
from autopar.rules.check import check_strategies
from autopar.rules.registry import default_registry

MESHES = [{"dp": 4}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "tp2": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_drawn_candidates(axes: dict[str, int], seed: int) -> None:
    graph = gpt2_graph()
    candidate = drawn_candidate(graph, mesh_of(**axes), seed, zero=seed)
    verify_candidate(graph, candidate, candidate.mesh.size)
    plan = planfile.make_plan(
        graph,
        candidate,
        model=ModelInfo("gpt2", graph.fingerprint, 1),
        cluster=ClusterInfo("some", candidate.mesh.size),
        parallelism=Parallelism(),
        optimizer="adamw",
    )
    assert planfile.decode(plan.to_json()) == plan


def edits(candidate: Candidate) -> list[Candidate]:
    """One change each: an arc left out, an operand or result moved."""
    out = []
    for index, block in enumerate(candidate.blocks):
        changed = []
        for arc in range(len(block.arcs)):
            changed.append(dataclasses.replace(block, arcs=block.arcs[:arc] + block.arcs[arc + 1 :]))
        for place, node in enumerate(block.nodes):
            for field in ("operands", "results"):
                for slot, placements in enumerate(getattr(node, field)):
                    other = (Partial() if placements[-1] == Replicate() else Replicate(),)
                    moved = list(getattr(node, field))
                    moved[slot] = placements[:-1] + other
                    bad = dataclasses.replace(node, **{field: tuple(moved)})
                    changed.append(dataclasses.replace(block, nodes=(*block.nodes[:place], bad, *block.nodes[place + 1 :])))
        blocks = candidate.blocks
        out += [dataclasses.replace(candidate, blocks=(*blocks[:index], bad, *blocks[index + 1 :])) for bad in changed]
    return out


def test_edits_are_refused() -> None:
    graph = gpt2_graph()
    candidate = drawn_candidate(graph, mesh_of(dp=2, tp=2), 1)
    accepted = [edit for edit in edits(candidate) if _accepted(graph, edit)]
    assert len(accepted) < 0.2 * len(edits(candidate))  # an operand may move to another placement that its value also has


def _accepted(graph: Graph, candidate: Candidate) -> bool:
    try:
        verify_candidate(graph, candidate)
    except PlanError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_strategies_of_drawn_candidates(axes: dict[str, int]) -> None:
    """Where arcs and boundaries agree, an operation may still not compute what the file says."""
    graph, registry = gpt2_graph(), default_registry()
    for seed in range(3):
        check_strategies(graph, drawn_candidate(graph, mesh_of(**axes), seed), registry)


def test_operations_that_no_rule_allows_are_refused() -> None:
    graph, registry = gpt2_graph(), default_registry()
    candidate = drawn_candidate(graph, mesh_of(dp=2, tp=2), 1)
    block = candidate.blocks[-1]
    node = dataclasses.replace(block.nodes[0], function="ap.nothing")
    bad = dataclasses.replace(block, nodes=(node, *block.nodes[1:]))
    with pytest.raises(PlanError, match="ap.nothing"):
        check_strategies(graph, dataclasses.replace(candidate, blocks=(*candidate.blocks[:-1], bad)), registry)
