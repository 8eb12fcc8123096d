"""Bounds of pipelines: bubble, micro-batches in flight, and both together against pipelines that were placed, partitioned and
priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import inf
from random import Random
from typing import Any

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.pipeline_grid import PipelineGrid

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.chunk_costs import chunk_costs
from autopar.cost_models.step.evaluate import stage_traces
from autopar.cost_models.step.pipeline_clock import micro_batches_in_flight
from autopar.ir.plan import Pipeline
from autopar.rules.registry import default_registry
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import chunks_of_stages, schedule_of, stage_of_chunks
from autopar.solve.bounds.block_relaxation import relax_blocks
from autopar.solve.bounds.call_lines import CallLines, DurationLine, SavedLine, duration_lines, saved_lines
from autopar.solve.bounds.call_state import CallState
from autopar.solve.bounds.cut_transfers import StageTransfer, stage_transfers
from autopar.solve.bounds.flow_bound import FlowRelaxation, operation_bound
from autopar.solve.bounds.stage_calls import BlockCalls, StageLimits
from autopar.solve.ilp.linear_model import Outcome, Status
from autopar.solve.ilp.solver import solve
from autopar.solve.ilp.solver_call import SolverName
from autopar.solve.pipeline import pipeline_bounds
from autopar.solve.pipeline.pipeline_bounds import ScheduleReport
from autopar.solve.pipeline.schedule_bound import ScheduleDetail, schedule_bound
from autopar.solve.pipeline.stage_relaxation import StageRelaxation, relaxed_calls, with_traded_lines
from autopar.solve.problem.problem import Problem
from autopar.solve.search_state import SearchPoint
from autopar.solve.space.grid import GridPoint, grid_points
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import ScheduleOption, schedule_options
from autopar.solve.space.problem_tables import ProblemTables
from autopar.solve.tighten import BoundTask, tasks_beside

SCHEDULES = [(2, 1, "1f1b", 4), (4, 1, "1f1b", 4), (4, 2, "1f1b", 8), (4, 1, "zb-h1", 8), (4, 2, "zbv", 8), (3, 4, "1f1b", 6)]


@dataclass(frozen=True)
class Layers:
    """Equal layers and a head, of which each saves a unit of bytes for each micro-batch, or is computed again."""

    layers: int = 24
    head: float = 3.0
    again: float = 0.35

    @property
    def calls(self) -> tuple[BlockCalls, ...]:
        return self._calls(1.0, self.layers, None), self._calls(self.head, 1, -1)

    def _calls(self, seconds: float, count: int, place: int | None) -> BlockCalls:
        three = (0.3 * seconds, 0.4 * seconds, 0.3 * seconds)
        directions = ((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (0.0, 1.0, 0.0))
        lines = tuple(DurationLine(*each, sum(w * part for w, part in zip(each, three, strict=True))) for each in directions)
        saved = (SavedLine(1.0, self.again, self.again),) if place is None else ()
        return BlockCalls(count, place, CallLines(lines, saved), (CallState(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),))

    def chunks(self, sizes: Sequence[int], again: Sequence[int]) -> list[ChunkSeconds]:
        """So many layers in each, of which so many are computed again; and the head in the last one."""
        out = []
        for chunk, (size, repeated) in enumerate(zip(sizes, again, strict=True)):
            n = size + (self.head if chunk + 1 == len(sizes) else 0.0)
            backward = 0.7 * n + self.again * repeated
            out.append(ChunkSeconds(0.3 * n, backward, weight_backward=0.3 * n))
        return out

    def most_held(self, pipeline: Pipeline, micro_batches: int, sizes: Sequence[int], again: Sequence[int]) -> float:
        """What the fullest stage saves, by the cost model."""
        saved = [float(size - repeated) for size, repeated in zip(sizes, again, strict=True)]
        held = 0.0
        for stage, mine in enumerate(chunks_of_stages(pipeline)):
            each = [saved[chunk] for chunk in mine]
            counts = micro_batches_in_flight(pipeline, stage, micro_batches, each)
            held = max(held, sum(count * size for count, size in zip(counts, each, strict=True)))
        return held


def bound_of(
    layers: Layers, stages: int, virtual: int, schedule: str, micro_batches: int, usable_bytes: float, transfer: float = 0.0
) -> float:
    option = ScheduleOption(virtual, schedule, 0.0, 1.0)
    limits = StageLimits(usable_bytes, 1.0, Overlap(), (StageTransfer(transfer),) * stages)
    return schedule_bound(stages, option, micro_batches, layers.calls, limits, ScheduleDetail.CLOCK)


@pytest.mark.parametrize(("stages", "virtual", "schedule", "micro_batches"), [*SCHEDULES, (2, 6, "1f1b", 4), (4, 4, "1f1b", 8)])
def test_no_partition_is_faster_than_the_program(stages: int, virtual: int, schedule: str, micro_batches: int) -> None:
    """Layers and a head dealt to the chunks at random, with recomputation drawn at random, on stages that have just that memory;
    and equal chunks in plenty of memory."""
    pipeline, layers, chunks = Pipeline(stages, virtual, schedule), Layers(), stages * virtual
    clock = ScheduleClock.of(schedule_of(pipeline, micro_batches))
    random, plenty = Random(0), 1e6
    free = bound_of(layers, stages, virtual, schedule, micro_batches, plenty)
    assert free > 1.02 * (layers.layers + layers.head) * micro_batches / stages
    lag = 0.2
    sent = bound_of(layers, stages, virtual, schedule, micro_batches, plenty, lag)
    assert sent > free
    option, limits = ScheduleOption(virtual, schedule, 0.0, 1.0), StageLimits(plenty, 1.0, Overlap())
    for level in (ScheduleDetail.COARSE, ScheduleDetail.FINE):
        assert schedule_bound(stages, option, micro_batches, layers.calls, limits, level) <= free * (1 + 1e-6)
    lags = [0.0 if here == there else lag for here, there in pairwise(stage_of_chunks(pipeline))]
    shortest, dearer = float("inf"), 0
    for draw in range(60):
        cuts = sorted(random.sample(range(1, layers.layers), chunks - 1)) if draw else even(layers.layers, chunks)
        sizes = [end - first for first, end in zip([0, *cuts], [*cuts, layers.layers], strict=True)]
        share = random.random() if draw else 0.0
        again = [sum(random.random() < share for _ in range(size)) for size in sizes]
        step = max(rank.end_seconds for rank in clock.run(layers.chunks(sizes, again)))
        assert max(rank.end_seconds for rank in clock.run(layers.chunks(sizes, again), lags)) >= sent * (1 - 1e-6)
        shortest = min(shortest, step)
        usable = layers.most_held(pipeline, micro_batches, sizes, again)
        bound = bound_of(layers, stages, virtual, schedule, micro_batches, max(usable, 1e-3)) if draw % 4 == 1 else free
        assert step >= bound * (1 - 1e-6)
        dearer += bound > free * (1 + 1e-6)
    # with one layer in most of the chunks, no partition is as even as the program's
    assert free >= (0.7 if layers.layers >= 3 * chunks else 0.65) * shortest
    assert dearer >= 1


@pytest.mark.parametrize(("virtual", "schedule"), [(1, "1f1b"), (1, "zb-h1"), (2, "1f1b"), (2, "zbv")])
def test_every_small_pipeline_takes_as_long_as_the_program(virtual: int, schedule: str) -> None:
    """All partitions of six layers on two stages, with all numbers of recomputed layers, by the memory that they take."""
    stages, micro_batches, layers = 2, 4, Layers(layers=6)
    pipeline, chunks = Pipeline(stages, virtual, schedule), stages * virtual
    clock = ScheduleClock.of(schedule_of(pipeline, micro_batches))
    fastest: dict[float, float] = {}
    for cuts in combinations(range(1, layers.layers), chunks - 1):
        sizes = [end - first for first, end in zip([0, *cuts], [*cuts, layers.layers], strict=True)]
        for again in product(*(range(size + 1) for size in sizes)):
            step = max(rank.end_seconds for rank in clock.run(layers.chunks(sizes, again)))
            held = layers.most_held(pipeline, micro_batches, sizes, again)
            fastest[held] = min(step, fastest.get(held, step))
    least, ratios = float("inf"), []
    for held, step in sorted(fastest.items()):
        least = min(least, step)
        bound = bound_of(layers, stages, virtual, schedule, micro_batches, max(held, 1e-3))
        assert bound <= least * (1 + 1e-6)
        ratios.append(bound / least)
    assert min(ratios) > 0.6
    assert max(ratios) > 0.85


def even(layers: int, chunks: int) -> list[int]:
    return [layers * k // chunks for k in range(1, chunks)]


def test_saved_bytes_and_recomputation_of_a_block_are_traded_at_the_best_rate() -> None:
    """Against the same program solved for some numbers of bytes: no point is below a line, and some are on one."""
    graph = gpt2_graph(layers=2, hidden=64, heads=4, vocabulary=128, seq=32, batch=4)
    cluster = replace(Cluster.parse("dgx-h100:1"), size=2)
    registry = default_registry()
    tables = ProblemTables(graph, cluster, SearchOptions(), registry)
    problem = tables.problem(next(iter(grid_points(graph, 2, 2, {}, registry))))
    block = max(relax_blocks(problem), key=lambda each: len(each.recompute))
    lines = saved_lines(block)
    everything = sum(each.copies / block.calls * each.bytes for name, each in block.tensors.items() if name not in block.shared)
    assert len(lines) >= 3
    # all is saved: nothing is recomputed
    assert all(line.saved * everything >= line.least * (1 - 1e-9) for line in lines)
    # nothing but what is needed is saved: all that may be recomputed is
    needed = sum(each.copies / block.calls * each.bytes for each in block.tensors.values() if not each.producer)
    again = sum(seconds for seconds, _ in block.recompute.values())
    assert all(line.recompute * again + line.saved * (needed + everything) >= line.least * (1 - 1e-9) for line in lines)
    # and with no bytes at all it does not work
    assert any(line.least > line.recompute * again * (1 + 1e-9) for line in lines)


def test_forward_and_backward_of_a_block_are_bounded_apart_and_together() -> None:
    graph = gpt2_graph(layers=2, hidden=64, heads=4, vocabulary=128, seq=32, batch=4)
    cluster = replace(Cluster.parse("dgx-h100:1"), size=4)
    registry = default_registry()
    tables = ProblemTables(graph, cluster, SearchOptions(), registry)
    for point in [each for each in grid_points(graph, 4, 4, {}, registry) if each.micro_batches == 1][:3]:
        problem = tables.problem(point)
        for name in problem.blocks:
            both, forward, backward, inputs = duration_lines(problem, name, 10.0)
            assert both.least_seconds >= (forward.least_seconds + backward.least_seconds) * (1 - 1e-5)
            assert backward.least_seconds >= inputs.least_seconds * (1 - 1e-5) > 0
            whole = both.least_seconds * problem.graph.count(name) * problem.micro_batches
            assert whole == pytest.approx(FlowRelaxation(problem, (name,)).bound(10.0), rel=1e-4)


def _pipelines(batch: int = 8) -> PipelineGrid:
    graph = gpt2_graph(layers=6, hidden=128, heads=4, vocabulary=512, seq=64, batch=batch)
    return PipelineGrid(graph, replace(Cluster.parse("local:4"), size=4), SearchOptions())


def sharp_bound(search: PipelineGrid, points: tuple[GridPoint, ...], best_seconds: float) -> float:
    return min(
        search.schedule_bound(points, option, ScheduleDetail.FINE, best_seconds)[1] for option in search.schedules(points[0])
    )


def relaxation_of(problem: Problem, point: GridPoint, cluster: Cluster) -> StageRelaxation:
    relaxed = relaxed_calls(problem, point.stages, relax_blocks(problem), lambda: 60.0)
    return StageRelaxation(problem, with_traded_lines(problem, relaxed, lambda: 60.0), cluster)


def test_blocks_are_relaxed_where_operations_alone_do_not_say_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    relaxed: list[int] = []
    original = pipeline_bounds.relaxed_calls
    monkeypatch.setattr(pipeline_bounds, "relaxed_calls", lambda *given: relaxed.append(given[1]) or original(*given))
    search = _pipelines()
    for point in search.points:
        search._relaxed.clear()
        operations = operation_bound(search.problem(point)) / point.stages
        enough = sharp_bound(search, (point,), operations / (1 - SearchOptions().sharp_gap))
        assert not relaxed and enough >= operations
        sharp = sharp_bound(search, (point,), float("inf"))
        assert relaxed.pop() == point.stages and not relaxed
        assert enough <= sharp * (1 + 1e-6)  # so it is below every plan too


def test_bounds_are_sharpened_no_further_than_needed() -> None:
    """The bound of a point ends at what is enough, and says as much as without an end where it is below."""
    search = _pipelines()
    point = max(search.points, key=lambda each: each.micro_batches * each.stages)
    whole = sharp_bound(search, (point,), float("inf"))
    assert sharp_bound(search, (point,), 2 * whole) == pytest.approx(whole, rel=1e-6)
    below = sharp_bound(search, (point,), 0.99 * whole)
    assert 0.99 * whole * (1 - SearchOptions().sharp_gap) <= below <= whole * (1 + 1e-6)


def test_who_waits_for_whom() -> None:
    """Beside a point other processes begin with one of each family that is not relaxed, and with those of relaxed ones that are
    looked at by their clock; coarse and fine ones are not worth a process."""
    search = _pipelines(batch=16)
    points = search.state.pipeline_points
    for each in points:
        search.with_memory(each)

    def first_tasks(points: Sequence[SearchPoint]) -> list[BoundTask]:
        return list(dict.fromkeys(next(search.tasks(each, float("inf"))) for each in points))

    def upcoming() -> list[BoundTask]:
        order = sorted(points, key=lambda each: each.bound_seconds)
        return list(tasks_beside(first, (task for each in order for task in search.tasks(each, float("inf")))))

    first, *others = first_tasks(points)
    beside = upcoming()
    assert len({task.makes for task in (first, *beside)}) == len(beside) + 1 < len(others) + 1
    sharp_bound(search, (points[0].point,), float("inf"))
    family = search.family(points[0].point)
    relaxed = [each for each in points if search.family(each.point) == family]
    for detail in (ScheduleDetail.COARSE, ScheduleDetail.FINE):
        tasks = first_tasks(relaxed)
        assert {task.key[2] for task in tasks} == {detail} and not set(tasks) & set(upcoming())
        for task in tasks:
            task.take(ScheduleReport(0.0, 0.0, None))
    clocks = set(first_tasks(relaxed))
    assert len(clocks) > 1 and {task.key[2] for task in clocks} == {ScheduleDetail.CLOCK} and clocks <= set(upcoming())


def test_state_and_memory_prices_no_operation() -> None:
    """A point whose family is relaxed needs what its state costs, and no strategy."""
    search = _pipelines()
    families: dict[object, list[GridPoint]] = {}
    for each in search.points:
        families.setdefault(search.family(each), []).append(each)
    first, second = next(each[:2] for each in families.values() if len({one.mesh for one in each}) > 1 and len(each) > 1)
    sharp_bound(search, (first,), float("inf"))
    sharp_bound(search, (second,), float("inf"))
    priced = [len(table.strategies._known) for table in search.problem(second).blocks.values()]  # type: ignore[attr-defined]
    assert sum(priced) == 0
    assert sum(len(table.strategies._known) for table in search.problem(first).blocks.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "memory_bytes"), [("local:4", 0), ("dgx-h100:1", 12 * 2**20)])
def test_no_pipeline_is_below_its_bound(text: str, memory_bytes: int) -> None:
    """Every point of the grid under every schedule, placed, partitioned and priced by the evaluator."""
    graph = gpt2_graph(layers=6, hidden=128, heads=4, vocabulary=512, seq=64, batch=8)
    cluster = replace(Cluster.parse(text), size=4)
    if memory_bytes:
        device = replace(cluster.device, memory_bytes=cluster.device.base_bytes + memory_bytes, communicator_bytes=0)
        cluster = replace(cluster, device=device, host=None)
    options = SearchOptions()
    search = PipelineGrid(graph, cluster, options)
    priced, above = 0, 0
    for point in search.points:
        problem = search.problem(point)
        calls_seconds = operation_bound(problem) / point.stages
        rough, bound = search.mesh_bound(point, calls_seconds), sharp_bound(search, (point,), float("inf"))
        relaxation = relaxation_of(problem, point, cluster)
        assert rough >= calls_seconds
        for option in schedule_options(search.graph, point, {}, ""):
            found = search.stage_search.solve_point(point, option)
            if found is not None and found.evaluation is not None and found.evaluation.fits:
                priced += 1
                step = found.evaluation.step_seconds
                assert step >= max(rough, bound) * (1 - 1e-6), f"{point} {option}"
                for level in ScheduleDetail:
                    assert step >= relaxation.under_schedule((point,), option, level) * (1 - 1e-6), f"{point} {option} {level}"
                above += bound > 0.6 * step
                assert step >= sharp_bound(search, (point,), step) * (1 - 1e-6), f"{point} {option}"
    assert priced >= 8
    assert above >= priced / 4


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("contention", [0.0, 0.5])
def test_communication_of_state_that_hides_counts_once(zero: int, contention: float) -> None:
    """Wide layers and few tokens: gathers of weights and reductions of gradients are nearly all of a step. Weights of further
    chunks arrive while a stage waits, its reductions run beside its next chunk, and its gathers beside gradients of weights."""
    graph = gpt2_graph(layers=8, hidden=1024, heads=4, vocabulary=64, seq=16, batch=8)
    node = Cluster.parse("dgx-h100:1")
    links = tuple(link.scaled(1 / 400) for link in node.links)
    cluster = replace(node, size=4, links=links, overlap=replace(node.overlap, contention=contention))
    options = SearchOptions(force={"zero": zero, "dp": 2, "pp": 2})
    search = PipelineGrid(graph, cluster, options)
    priced = 0
    for point in search.points:
        relaxation = relaxation_of(search.problem(point), point, cluster)
        for option in schedule_options(search.graph, point, {}, ""):
            found = search.stage_search.solve_point(point, option)
            if found is not None and found.evaluation is not None:
                step = found.evaluation.step_seconds
                assert step >= search.mesh_bound(point, 0.0) * (1 - 1e-6), f"{point} {option}"
                for level in ScheduleDetail:
                    assert step >= relaxation.under_schedule((point,), option, level) * (1 - 1e-6), f"{point} {option} {level}"
                priced += option.virtual > 1
    assert priced >= 2


@pytest.mark.parametrize("text", ["local:4", "dgx-h100:1"])
def test_no_stage_sends_in_less(text: str) -> None:
    """Every cut of every pipeline of the grid, by the evaluator's own transfers."""
    graph = gpt2_graph(layers=6, hidden=128, heads=4, vocabulary=512, seq=64, batch=8)
    cluster, options = replace(Cluster.parse(text), size=4), SearchOptions()
    search = PipelineGrid(graph, cluster, options)
    ratios = []
    for point in search.points:
        least = stage_transfers(search.problem(point), cluster, point.stages)
        for option in schedule_options(search.graph, point, {}, ""):
            found = search.stage_search.solve_point(point, option)
            if found is None or found.graph is None or found.candidate is None:
                continue
            limits = StageLimits(1.0, 1.0, cluster.overlap, least)
            between = limits.between_chunks(stage_of_chunks(found.candidate.pipeline))
            traces = stage_traces(found.graph, found.candidate, cluster)
            costs = chunk_costs(found.graph, found.candidate, cluster, traces, optimizer_named("adamw"))
            sent = [cost.send_seconds for cost in costs[:-1]]
            assert all(seconds >= each.seconds * (1 - 1e-9) for seconds, each in zip(sent, between, strict=True)), (
                f"{point} {option}"
            )
            ratios += [each.seconds / seconds for seconds, each in zip(sent, between, strict=True) if seconds]
    assert len(ratios) >= 20
    assert max(ratios) == pytest.approx(1.0)


def test_a_clock_that_glop_does_not_solve_is_bounded_by_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    search, names = _pipelines(), list[str]()
    point = search.points[0]
    option = search.schedules(point)[0]
    expected = search.schedule_bound((point,), option, ScheduleDetail.CLOCK, inf)[1]

    def imprecise(model: Any, *, solver: SolverName, relaxed: bool) -> Outcome:
        names.append(solver)
        if solver == "glop":
            return Outcome(Status.TIMEOUT, (), inf, -inf)
        return solve(model, solver=solver, relaxed=relaxed)

    monkeypatch.setattr("autopar.solve.pipeline.schedule_bound.solve", imprecise)
    assert search.schedule_bound((point,), option, ScheduleDetail.CLOCK, inf)[1] == pytest.approx(expected, rel=1e-6)
    assert names == ["glop", "highs"]
