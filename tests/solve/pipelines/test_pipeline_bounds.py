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
from autopar.solve.bounds.call_levels import CallLevel, CallLevels
from autopar.solve.bounds.flow_bound import operation_bound
from autopar.solve.ilp.linear_model import LinearModel
from autopar.solve.ilp.solver import Status, solve
from autopar.solve.pipeline.bubble_bound import WorkShare, bubble_factor
from autopar.solve.pipeline.in_flight_levels import ScheduleProfile, call_levels, schedule_profile
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


def least_held(levels: CallLevels, counts: dict[str, float]) -> float:
    """What calls hold at least together, by a linear program of the levels alone."""
    model = LinearModel()
    for name, columns in levels.add_to(model, counts).items():
        model.minimise({column: counts[name] * in_flight for column, in_flight in columns})
    outcome = solve(model, relaxed=True)
    return outcome.objective if outcome.status is Status.OPTIMAL else float("inf")


@pytest.mark.parametrize(("stages", "virtual", "schedule", "micro_batches"), SCHEDULES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_no_partition_holds_less(stages: int, virtual: int, schedule: str, micro_batches: int, blocks: int) -> None:
    """What calls dealt at random hold, at the moment of the profile, against the levels of stages as slow as theirs; of two
    blocks, one after the other, the second takes twice as long. A block of one call comes first."""
    pipeline, calls = Pipeline(stages, virtual, schedule), 24
    names = ["first", *("early" if blocks == 1 or call < calls // 2 else "late" for call in range(1, calls))]
    seconds = {"first": 0.0, "early": 1.0, "late": 2.0}
    profile = schedule_profile(stages, virtual, schedule, micro_batches)
    random, counts = Random(1), {name: float(names.count(name)) for name in dict.fromkeys(names)}
    closest = 0.0
    for draw in range(100):
        even = [calls * k // (stages * virtual) for k in range(1, stages * virtual)]
        cuts = sorted(random.sample(range(1, calls), stages * virtual - 1)) if draw else even
        parts = [names[first:end] for first, end in zip([0, *cuts], [*cuts, calls], strict=True)]
        least, slowest = 0.0, 0.0
        for mine, held in zip(chunks_of_stages(pipeline), profile.in_flight, strict=True):
            slowest = max(slowest, sum(seconds[name] for chunk in mine for name in parts[chunk]))
            # the chunks of a stage in the order that holds least
            sizes = sorted((len(parts[chunk]) for chunk in mine), reverse=True)
            least += sum(size * count for size, count in zip(sizes, held, strict=True))
        found = least_held(CallLevels(call_levels([profile]), virtual, seconds, slowest), counts)
        assert found <= least * (1 + 1e-9)
        closest = max(closest, found / least)
    assert closest > 0.6


def test_two_blocks_share_the_seconds_of_a_stage() -> None:
    """Both cannot be where least is in flight: four calls of two seconds in all on each of two stages."""
    levels = (CallLevel(1, stages=1), CallLevel(2, stages=1))
    alone = CallLevels(levels, 1, {"a": 1.0, "b": 1.0}, 4.0)
    assert least_held(alone, {"a": 4.0}) == pytest.approx(4.0)
    assert least_held(alone, {"a": 4.0, "b": 4.0}) == pytest.approx(12.0)
    assert least_held(alone, {"a": 5.0, "b": 4.0}) == float("inf")


def test_levels_of_several_schedules_are_below_each() -> None:
    first = ScheduleProfile(((2, 5), (1, 6)), drains=True)
    second = ScheduleProfile(((1, 3, 9), (3, 3, 4)), drains=True)
    assert call_levels([first, second]) == (
        CallLevel(1, stages=1), CallLevel(2, stages=1), CallLevel(4, chunks=1), CallLevel(6, chunks=1),
    )  # fmt: skip


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
        calls_seconds = operation_bound(search.problem(point)) / point.stages
        rough, bound = search.rough_bound(point, calls_seconds), search.sharp_bound(point, float("inf"))
        assert rough >= calls_seconds
        for option in schedule_options(search.graph, point, {}, ""):
            found = search.stage_search.solve_point(point, option)
            if found is not None and found.evaluation is not None and found.evaluation.fits:
                priced += 1
                step = found.evaluation.step_seconds
                assert step >= max(rough, bound) * (1 - 1e-6), f"{point} {option}"
                above += bound > 0.6 * step
                assert step >= search.sharp_bound(point, step) * (1 - 1e-6), f"{point} {option}"
    assert priced >= 8
    assert above >= priced / 4
