"""Candidates drawn at random are accepted, round-trip exactly, and are refused after each of many small edits."""

from __future__ import annotations

import dataclasses

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.handwritten_candidates import candidate
from support.plans.mesh import mesh_of

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import Partial, Replicate
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.plan_file import plan_file as planfile
from autopar.ir.plan_file.document import ClusterInfo, ModelInfo, Parallelism
from autopar.ir.verify import verify_candidate
from autopar.rules.check import check_strategies
from autopar.rules.registry import default_registry
from autopar.schedules.pipeline_schedule import chunks_of_stages

MESHES = [{"dp": 4}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "tp2": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_drawn_candidates(axes: dict[str, int], seed: int) -> None:
    graph = gpt2_graph()
    candidate = drawn_candidate(graph, mesh_of(**axes), seed, zero=seed)
    verify_candidate(graph, candidate, candidate.mesh.size)
    plan = planfile.assemble_plan(
        graph,
        candidate,
        model=ModelInfo("gpt2", graph.fingerprint, 1),
        cluster=ClusterInfo("some", candidate.mesh.size),
        parallelism=Parallelism(),
        optimizer="adamw",
    )
    assert planfile.decode_plan(plan.to_json()) == plan


def edits(candidate: Candidate) -> list[Candidate]:
    """One change each: a conversion left out, an operand or result moved."""
    out = []
    for index, block in enumerate(candidate.blocks):
        changed = []
        for index_of in range(len(block.conversions)):
            changed.append(
                dataclasses.replace(block, conversions=block.conversions[:index_of] + block.conversions[index_of + 1 :])
            )
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
    """Where conversions and boundaries agree, an operation may still not compute what the file says."""
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


def piped(pipeline: Pipeline, micro_batches: int = 4) -> tuple[Graph, Candidate]:
    graph = gpt2_graph(layers=4, batch=16)
    made = candidate(graph, 1, dp=2)
    return graph, dataclasses.replace(made, micro_batches=micro_batches, pipeline=pipeline)


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(2),
        Pipeline(2, 2),
        Pipeline(2, 1, "zb-h1", cuts=(4,)),
        Pipeline(2, 2, "zbv", cuts=(1, 3, 4)),
        Pipeline(4),
    ],
    ids=str,
)
def test_pipelines_round_trip_with_their_stages(pipeline: Pipeline) -> None:
    graph, made = piped(pipeline)
    verify_candidate(graph, made, 2 * pipeline.stages)
    plan = planfile.assemble_plan(
        graph,
        made,
        model=ModelInfo("gpt2", graph.fingerprint, 1),
        cluster=ClusterInfo("some", made.devices),
        parallelism=Parallelism(),
        optimizer="adamw",
        stage_chunks=chunks_of_stages(made.pipeline),
    )
    assert planfile.decode_plan(plan.to_json()) == plan and plan.candidate.pipeline == pipeline
    stages = plan.document.stages
    assert len(stages) == pipeline.stages and all(stage.calls == tuple(sorted(stage.calls)) for stage in stages)
    assert sorted(index for stage in stages for index in stage.calls) == list(range(len(graph.calls)))
    if pipeline.schedule == "zbv":
        assert stages[0].chunks == (0, 3) and stages[0].calls == (0, 4, 5)


@pytest.mark.parametrize(
    ("pipeline", "micro_batches", "said"),
    [
        (Pipeline(8), 4, "has 6 blocks, 8 stages of 1 chunks need 8: take fewer stages"),
        (Pipeline(2, cuts=(2, 4)), 4, "2 cuts do not make 2 chunks"),
        (Pipeline(3, cuts=(4, 2)), 4, "must increase"),
        (Pipeline(2, cuts=(6,)), 4, "must increase"),
        (Pipeline(2, 2), 8, "divide"),
        (Pipeline(2, repeated=("nothing",)), 4, "nothing is repeated"),
        (Pipeline(2, weight_versions=3), 4, "weight_versions=3"),
    ],
    ids=str,
)
def test_pipelines_that_cannot_be_are_one_line(pipeline: Pipeline, micro_batches: int, said: str) -> None:
    graph, made = piped(pipeline, micro_batches)
    if said == "divide":
        made = dataclasses.replace(made, micro_batches=3)
    with pytest.raises(PlanError, match=said) as caught:
        verify_candidate(graph, made, 2 * pipeline.stages)
    assert "\n" not in str(caught.value)
