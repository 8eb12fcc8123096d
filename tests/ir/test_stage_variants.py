"""A pipeline's plan whose blocks are split, or have a plan for each stage, is read from its file and fits its model again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import PlanError
from autopar.ir.pipeline.split_blocks import single_tensor_cuts, split_block, split_like
from autopar.ir.pipeline.stage_variants import with_stage_variants, without_stage_variants
from autopar.ir.plan_file.codec import graph_fingerprint
from autopar.ir.plan_file.document import ClusterInfo, ModelInfo, Parallelism
from autopar.ir.plan_file.plan_file import Plan, assemble_plan, check_graph, load_plan
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration

GRAPH = gpt2_graph(layers=4, batch=16)
GRAPH = replace(GRAPH, fingerprint=graph_fingerprint(GRAPH))


def planned(is_split: bool) -> Plan:
    """Layers of the second stage have ZeRO-2, those of the first ZeRO-1."""
    graph, layer = GRAPH, GRAPH.calls[1].block
    if is_split:
        graph = split_block(graph, layer, single_tensor_cuts(graph.block(layer))[:1])
    wanted = FixedConfiguration(pp=2, zero=1, micro_batches=4)
    candidate = fixed_candidate(graph, Cluster.parse("local:4"), wanted)
    half = len(graph.calls) // 2
    plans = [replace(candidate.block(call.block), zero=1 + (index >= half)) for index, call in enumerate(graph.calls)]
    graph, blocks, _ = with_stage_variants(graph, plans)
    candidate = replace(candidate, blocks=blocks, pipeline=replace(candidate.pipeline, cuts=(half,), layers=()))
    return assemble_plan(
        graph,
        candidate,
        model=ModelInfo(graph.name, graph.fingerprint, 1000),
        cluster=ClusterInfo("local:4", 4),
        parallelism=Parallelism(dp=2, pp=2, zero=2),
        optimizer="adamw",
        stage_chunks=((0,), (1,)),
    )


@pytest.mark.parametrize("is_split", [False, True])
def test_its_file_is_used_alone_and_on_the_model(is_split: bool, tmp_path: Path) -> None:
    plan, path = planned(is_split), tmp_path / "plan.json"
    layers = [block for block in plan.graph.blocks if block.name.startswith(GRAPH.calls[1].block)]
    assert len(layers) == (4 if is_split else 2)
    plan.save(path)
    found = load_plan(path)
    assert check_graph(found, str(path)) == plan
    assert found.with_graph(GRAPH) == plan
    assert is_split or replace(without_stage_variants(plan.graph), batch=GRAPH.batch) == GRAPH


def test_of_another_model_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        planned(False).with_graph(gpt2_graph(layers=5, batch=16))


def test_equal_parts_of_different_blocks_stay_apart() -> None:
    """A frozen layer and another one are split alike: their operations without parameters are equal blocks of other names."""
    layer = GRAPH.block(GRAPH.calls[1].block)
    parameters = tuple(replace(each, trainable=False) for each in layer.parameters)
    frozen = replace(layer, name="Frozen", parameters=parameters)
    calls = (GRAPH.calls[0], replace(GRAPH.calls[1], block="Frozen"), *GRAPH.calls[2:])
    graph = replace(GRAPH, blocks=(GRAPH.blocks[0], frozen, *GRAPH.blocks[1:]), calls=calls)
    places = range(1, len(layer.nodes))
    split = split_block(split_block(graph, "Frozen", places), layer.name, places)
    assert len(without_stage_variants(split).blocks) < len(split.blocks)
    assert split_like(graph, split) == split
