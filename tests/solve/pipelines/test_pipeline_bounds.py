"""Bounds of pipelines: bubble, micro-batches in flight, and both together against pipelines that were placed, partitioned and
priced."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Pipeline
from autopar.rules.registry import default_registry
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.placement import chunks_of_stages
from autopar.solve.pipeline.bubble_bound import WorkShare, bubble_factor
from autopar.solve.pipeline.in_flight_shares import in_flight_shares, least_shares, schedule_profile
from autopar.solve.pipeline.pipeline_search import PipelineSearch
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import ScheduleOption, schedule_options
from autopar.solve.space.problem_tables import ProblemTables

SCHEDULES = [(2, 1, "1f1b", 4), (4, 1, "1f1b", 4), (4, 2, "1f1b", 8), (4, 1, "zb-h1", 8), (4, 2, "zbv", 8), (3, 4, "1f1b", 6)]


@pytest.mark.parametrize(("stages", "virtual", "schedule", "micro_batches"), SCHEDULES)
def test_no_partition_is_faster_than_the_bubble_says(stages: int, virtual: int, schedule: str, micro_batches: int) -> None:
    """Layers and a head, dealt to the chunks at random."""
    clock = ScheduleClock.of(schedule_of(Pipeline(stages, virtual, schedule), micro_batches))
    layers, head, chunks = 24, 3.0, stages * virtual
    whole = layers + head
    shares = (
        WorkShare(layers / whole, 0.3 * layers / whole, 0.4 * layers / whole, 0.7 * layers / whole, None, 1 / whole),
        WorkShare(head / whole, 0.5 * head / whole, 0.25 * head / whole, 0.5 * head / whole, -1, head / whole),
    )
    option = ScheduleOption(virtual, schedule, 0.0, 1.0)
    factor = bubble_factor(stages, option, micro_batches, shares)
    assert factor > 1.02
    random, shortest = Random(0), float("inf")
    for draw in range(200):
        cuts = sorted(random.sample(range(1, layers), chunks - 1)) if draw else [layers * k // chunks for k in range(1, chunks)]
        sizes = [end - first for first, end in zip([0, *cuts], [*cuts, layers], strict=True)]
        seconds = [ChunkSeconds(0.3 * n, 0.7 * n, input_backward=0.4 * n, weight_backward=0.3 * n) for n in sizes]
        last = sizes[-1]
        seconds[-1] = ChunkSeconds(
            0.3 * last + 1.5, 0.7 * last + 1.5, input_backward=0.4 * last + 0.75, weight_backward=0.3 * last + 0.75
        )
        step = max(rank.end_seconds for rank in clock.run(seconds))
        shortest = min(shortest, step)
        assert step >= factor * whole * micro_batches / stages * (1 - 1e-9)
    assert factor * whole * micro_batches / stages >= 0.7 * shortest


@pytest.mark.parametrize(("stages", "virtual", "schedule", "micro_batches"), SCHEDULES)
def test_no_partition_holds_less(stages: int, virtual: int, schedule: str, micro_batches: int) -> None:
    """What calls dealt at random hold, at the moment of the profile, against the shares of as many calls a stage."""
    pipeline, calls = Pipeline(stages, virtual, schedule), 24
    profile = schedule_profile(stages, virtual, schedule, micro_batches)
    held = {}
    for stage, (mine, counts) in enumerate(zip(chunks_of_stages(pipeline), profile.in_flight, strict=True)):
        ordered = sorted(counts) if virtual > 1 else list(counts)
        for chunk, count in zip(mine, ordered, strict=True):
            held[chunk] = stage, count
    random, chunks = Random(1), stages * virtual
    for _ in range(100):
        cuts = sorted(random.sample(range(1, calls), chunks - 1))
        sizes = [end - first for first, end in zip([0, *cuts], [*cuts, calls], strict=True)]
        per_stage = [sum(sizes[chunk] for chunk in held if held[chunk][0] == stage) for stage in range(stages)]
        shares = in_flight_shares(profile, calls, 0, max(per_stage))
        assert sum(share for share, _ in shares) == pytest.approx(1.0)
        # the chunks of a stage in the order that holds least
        least = 0.0
        for stage in range(stages):
            mine = sorted((sizes[chunk] for chunk in held if held[chunk][0] == stage), reverse=True)
            least += sum(size * count for size, count in zip(mine, profile.in_flight[stage], strict=True))
        assert calls * sum(share * count for share, count in shares) <= least * (1 + 1e-9)


def test_shares_of_several_schedules_are_below_each() -> None:
    every = [((0.5, 1), (0.5, 4)), ((0.2, 2), (0.8, 3))]
    assert least_shares(every) == ((0.5, 1), (0.5, 3))


@pytest.mark.parametrize(("text", "memory_bytes"), [("local:4", 0), ("dgx-h100:1", 12 * 2**20)])
def test_no_pipeline_is_below_its_bound(text: str, memory_bytes: int) -> None:
    """Every point of the grid under every schedule, placed, partitioned and priced by the evaluator."""
    graph = gpt2_graph(layers=6, hidden=128, heads=4, vocabulary=512, seq=64, batch=8)
    cluster = replace(Cluster.parse(text), size=4)
    if memory_bytes:
        device = replace(cluster.device, memory_bytes=cluster.device.base_bytes + memory_bytes, communicator_bytes=0)
        cluster = replace(cluster, device=device, host=None)
    options, registry = SearchOptions(), default_registry()
    search = PipelineSearch(graph, cluster, options, registry, ProblemTables(graph, cluster, options, registry), lambda: 60.0)
    search.list_points()
    priced, above = 0, 0
    for point in search.points:
        bound = search.sharp_bound(point, float("inf"))
        for option in schedule_options(search.graph, point, {}, ""):
            found = search.stage_search.solve_point(point, option)
            if found is not None and found.evaluation is not None and found.evaluation.fits:
                priced += 1
                step = found.evaluation.step_seconds
                assert step >= bound * (1 - 1e-6), f"{point} {option}"
                above += bound > 0.6 * step
                assert step >= search.sharp_bound(point, step) * (1 - 1e-6), f"{point} {option}"
    assert priced >= 8
    assert above >= priced / 4
