"""Pipelines use the memory of their stages: the calls of a chunk recompute differently where one option does not fit for all."""

from __future__ import annotations

from dataclasses import replace

from support.models.handwritten_blocks import gpt2_graph
from support.plans.pipeline_grid import PipelineGrid

from autopar.cost_models.hardware.cluster import Cluster
from autopar.solve.pipeline.stage_tables import least_of_mixtures
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import schedule_options


def test_no_plan_gets_slower_and_some_get_faster() -> None:
    """With memory for a part of what all calls would save, by the evaluator; within the budget of every stage."""
    graph = gpt2_graph(layers=8, hidden=512, heads=8, vocabulary=256, seq=1024, batch=64)
    node = Cluster.parse("dgx-h100:1")
    device = replace(node.device, memory_bytes=int(4.1 * 2**30))
    cluster = replace(node, size=4, device=device)
    search = PipelineGrid(graph, cluster, SearchOptions(force={"dp": 2, "pp": 2}))
    faster = mixed = 0
    for point in search.points:
        for option in schedule_options(search.graph, point, {}, ""):
            plain = search.stage_search.solve_point(point, option)
            full = search.stage_search.solve_point(point, option, rival_seconds=float("inf"))
            if plain is None or full is None:
                assert plain is full is None
                continue
            assert plain.evaluation and full.evaluation and full.graph and full.candidate
            assert full.evaluation.fits and full.evaluation.step_seconds <= plain.evaluation.step_seconds
            faster += full.evaluation.step_seconds < 0.99 * plain.evaluation.step_seconds
            mixed += len(full.graph.blocks) > len(plain.graph.blocks)  # type: ignore[union-attr]
            never = search.stage_search.solve_point(point, option, rival_seconds=0.5 * full.evaluation.step_seconds)
            assert never is not None and never.candidate == plain.candidate
    assert faster and mixed


def test_mixtures_lie_between_two_options() -> None:
    points = [(10.0, 8.0), (20.0, 5.0), (40.0, 4.0)]
    assert least_of_mixtures(points, 9.0) == float("inf")
    assert [least_of_mixtures(points, size) for size in (10.0, 15.0, 20.0, 30.0, 50.0)] == [8.0, 6.5, 5.0, 4.5, 4.0]
