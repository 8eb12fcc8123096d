"""Pipelines use the memory of their stages: the calls of a chunk recompute differently where one option does not fit for all."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.pipeline_grid import PipelineGrid

from autopar.cost_models.hardware.cluster import Cluster
from autopar.solve.pipeline.stage_choices import StageChoices, StagePlan
from autopar.solve.pipeline.stage_tables import CallCost, least_of_mixtures
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


@pytest.mark.parametrize("seed", range(8))
def test_choices_are_within_a_step_of_the_best(seed: int) -> None:
    """Against every choice of every call: no set of them in a budget that is smaller by one step is faster."""
    draw = random.Random(seed)
    names = [(option, zero) for option in range(3) for zero in (1, 3)]
    costs = [CallCost(draw.uniform(1, 2), 0.5, 0.2, 0.0, 0.1, draw.uniform(0, 9), 0.0, 0.0) for _ in names]
    saved = [[draw.uniform(0, 9)] * 4 for _ in range(3)]
    tables: Any = SimpleNamespace(
        graph=SimpleNamespace(calls=[SimpleNamespace(block="layer")] * 4),
        setting=SimpleNamespace(micro_batches=3),
        names=names,
        calls=[{"layer": cost} for cost in costs],
        saved=saved,
        held=1.25,
    )
    choices = StageChoices([tables], [0, 0], [2.0, 1.0])
    edges, zeros = (0, 2, 4), (3, 1, 3, 1)
    sets = product(*([name for name in names if name[1] == zero] for zero in zeros))
    every = [StagePlan(edges, each) for each in sets]
    taken = [(choices.stage_bytes(each)[0], choices.busiest_seconds(each)) for each in every]
    least = min(size for size, _ in taken)
    assert choices.fastest(edges, zeros, [least * (1 - 1e-9)]) is None
    step = 1.25 * 2 * 9 + 9
    for budget in (least * (1 + 1e-9), least + 15, least + 40, least + 100):
        found = choices.fastest(edges, zeros, [budget])
        assert found is not None and tuple(zero for _, zero in found.choices) == zeros
        assert choices.stage_bytes(found)[0] <= budget * (1 + 1e-9)
        rivals = [seconds for size, seconds in taken if size <= budget - step]
        assert choices.busiest_seconds(found) <= min(rivals, default=inf) + 1e-9
    whole = choices.fastest(edges, zeros, [1e9])
    assert whole is not None and choices.busiest_seconds(whole) <= min(seconds for _, seconds in taken) + 1e-9
    assert sum(each.step for each in choices.call_seconds(whole)) == pytest.approx(choices.busiest_seconds(whole))


def test_mixtures_lie_between_two_options() -> None:
    points = [(10.0, 8.0), (20.0, 5.0), (40.0, 4.0)]
    assert least_of_mixtures(points, 9.0) == float("inf")
    assert [least_of_mixtures(points, size) for size in (10.0, 15.0, 20.0, 30.0, 50.0)] == [8.0, 6.5, 5.0, 4.5, 4.0]
