"""The stage search: placements of the blocks are solved once for each stage mesh and micro-batch, a dynamic program partitions
the calls into model chunks, and the evaluator prices the most promising pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.allocator import communicator_count, tensor_budget_bytes
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.pipeline_clock import micro_batches_in_flight
from autopar.cost_models.step.stage_devices import stage_cluster, stage_clusters
from autopar.cost_models.step.stage_p2p import stage_link
from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_variants import with_stage_variants
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.verify import verify_candidate
from autopar.schedules.placement import stage_of_chunks
from autopar.solve.bounds.memory_frontier import MemoryFrontier, fastest_sharding, with_less_memory
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.cut_points import allowed_ranges
from autopar.solve.pipeline.repeated_values import values_worth_repeating
from autopar.solve.pipeline.spare_bytes import spare_bytes
from autopar.solve.pipeline.stage_partition import Matrix, best_partition
from autopar.solve.pipeline.stage_tables import (
    BestRanges,
    RangeOptions,
    StageSetting,
    StageTables,
    TracedOptions,
    best_ranges,
    with_sends,
)
from autopar.solve.problem.forced_axes import check_forced_axes, forced_axes, why_disobeyed
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import ScheduleOption, schedule_options
from autopar.solve.space.problem_tables import ProblemTables

_MOST_PRICED = 16
"""At most so many pipelines are partitioned and priced."""

_MOST_PER_MESH = 4
"""And at most so many of one stage mesh and number of stages, unless one of them is the best."""

_WORTH_PRICING = 1.04
"""Estimates that are not above the best plan by more than that are worth pricing."""

_TRIES = 3
"""How often a pipeline that does not fit by the evaluator is partitioned with a smaller memory budget."""


def _bubble_factor(point: GridPoint, option: ScheduleOption) -> float:
    """The step with its bubble over that of the fullest stage."""
    return 1 + option.bubble_passes * (point.stages - 1) / point.micro_batches


class _Ratios:
    """Estimates without memory over bounds. A bound is of the largest micro-batch: smaller ones take as much longer at least, by
    the example."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._known: dict[object, list[tuple[int, ScheduleOption, float]]] = {}

    def examples(self, point: GridPoint) -> int:
        """Of one micro-batch on one data rank."""
        return self._batch // point.micro_batches // point.mesh.size_of(DATA_AXIS)

    def least(self, point: GridPoint, option: ScheduleOption) -> float:
        """What larger micro-batches showed of this schedule, or of any."""
        known = [each for each in self._known.get(self._key(point), ()) if each[0] >= self.examples(point)]
        same = [ratio for _, of, ratio in known if (of.schedule, of.virtual) == (option.schedule, option.virtual)]
        return max(1.0, max(same, default=0.0) or min((ratio for *_, ratio in known), default=1.0))

    def learn(self, point: GridPoint, ratios: Mapping[ScheduleOption, float]) -> None:
        """The schedules of `point` take so many times what its bound with their bubble says."""
        self._known.setdefault(self._key(point), []).extend((self.examples(point), *each) for each in ratios.items())

    @staticmethod
    def _key(point: GridPoint) -> object:
        return point.mesh.axes[1:], point.mesh.size_of(DATA_AXIS) > 1


_TracedFrontier = tuple[MemoryFrontier, TracedOptions]


@dataclass(frozen=True, slots=True)
class PlacedPoint:
    """A point whose blocks are placed, and priced on the devices of each stage."""

    point: GridPoint
    frontier: MemoryFrontier
    costs: dict[Device, dict[str, BlockCosts]]
    tables: dict[Device, StageTables]


class StageSearch:
    """Of one graph on one cluster. `seconds_left` says how long the search may still run, `refusal` why the last plan that did
    not obey a forced degree was left out."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, tables: ProblemTables, seconds_left: Callable[[], float]
    ) -> None:
        self.graph, self.cluster, self.options, self.tables, self.seconds_left = graph, cluster, options, tables, seconds_left
        self._frontiers: dict[object, _TracedFrontier | None] = {}
        self._ranges: dict[tuple[GridPoint, Device], RangeOptions] = {}
        self._allowed: Matrix | None = None
        self.refusal = ""

    def promising(self, points: Mapping[GridPoint, float], best_seconds: float) -> list[tuple[float, GridPoint, ScheduleOption]]:
        """The estimated step of each point (with its lower bound) with each of its schedules, the shortest first. Half of the
        time is left for pricing. AutoparError where a forced schedule fits none of the points."""
        out, half = [], self.seconds_left() / 2
        ratios = _Ratios(self.graph.batch)
        for point, every in self._with_schedules(sorted(points, key=lambda each: (points[each], -ratios.examples(each)))):
            if self.seconds_left() <= half:
                break
            least = {each: points[point] * _bubble_factor(point, each) for each in every}
            schedules = [each for each in every if least[each] * ratios.least(point, each) < best_seconds]
            if not schedules:
                continue
            try:
                fastest = self.place(point, fastest=True)
                if fastest is None:
                    continue
                seconds = {each: self._estimate(fastest, each, inf) for each in schedules}
                ratios.learn(point, {each: found / least[each] for each, found in seconds.items()})
                schedules = [each for each in schedules if seconds[each] < best_seconds]
                placed = self.place(point) if schedules else None
            except AutoparError:
                if self.options.force or self.options.schedule:
                    raise
                continue
            if placed is not None:
                estimates = [(self._estimate(placed, each), point, each) for each in schedules]
                out += [each for each in estimates if each[0] < best_seconds]
        return sorted(out, key=lambda each: (each[0], each[1].stages, each[2].virtual))

    def _with_schedules(self, points: Sequence[GridPoint]) -> list[tuple[GridPoint, tuple[ScheduleOption, ...]]]:
        """The points with as many micro-batches as a forced schedule takes."""
        out, refused = [], dict[int, PlanError]()
        for point in points:
            try:
                out.append((point, schedule_options(self.graph, point, self.options.force, self.options.schedule)))
            except PlanError as error:
                refused[point.micro_batches] = error
        if refused and not out:
            raise refused[max(refused)]
        return out

    def solutions(
        self, estimates: Sequence[tuple[float, GridPoint, ScheduleOption]], best_seconds: float
    ) -> Iterator[MeshSolution]:
        """The pipelines of `estimates`, partitioned and priced; those that fit."""
        tried: dict[object, int] = {}
        count = 0
        for seconds, point, option in estimates:
            key = point.mesh, point.stages
            if seconds >= best_seconds * _WORTH_PRICING or self.seconds_left() <= 0 or count >= _MOST_PRICED:
                return
            if tried.get(key, 0) >= _MOST_PER_MESH:
                continue
            tried[key] = tried.get(key, 0) + 1
            count += 1
            result = self.solve_point(point, option)
            if result is not None:
                yield result
                if result.evaluation is not None and result.evaluation.step_seconds < best_seconds:
                    best_seconds, tried[key] = result.evaluation.step_seconds, 0

    # -- one point

    def place(self, point: GridPoint, fastest: bool = False) -> PlacedPoint | None:
        """None where its blocks cannot be placed in time. `fastest`: with the option that saves all only."""
        found = self._frontier(point, fastest)
        if found is None:
            return None
        costs: dict[Device, dict[str, BlockCosts]] = {}
        tables: dict[Device, StageTables] = {}
        for part in stage_clusters(self.cluster, point.stages):
            if part.device not in costs:
                costs[part.device] = self._costs(found[0], point, part)
                runs = found[1]
                if part.device != found[0].problem.cluster.device:
                    runs = TracedOptions.of(self.graph, found[0].options, costs[part.device])
                tables[part.device] = self._tables(point, part, runs, costs[part.device])
        return PlacedPoint(point, found[0], costs, tables)

    def _costs(self, found: MemoryFrontier, point: GridPoint, part: Cluster) -> dict[str, BlockCosts]:
        out = {}
        for name, table in found.problem.blocks.items():
            out[name] = BlockCosts(table.block, point.mesh, self.graph.batch // point.micro_batches, part, point.zero_group)
            out[name].share_with(table.costs)
        return out

    def _tables(self, point: GridPoint, part: Cluster, runs: TracedOptions, costs: dict[str, BlockCosts]) -> StageTables:
        data = point.mesh.size_of(DATA_AXIS)
        zeros = self.options.zeros if data > 1 else (0,)
        setting = StageSetting(
            batch=self.graph.batch,
            micro_batches=point.micro_batches,
            shards=point.zero_group or data,
            precision=self.options.precision,
            optimizer=self.options.optimizer,
            device=part.device,
            overlap=part.overlap,
        )
        return StageTables(self.graph, runs, costs, zeros, setting)

    def _frontier(self, point: GridPoint, fastest: bool) -> _TracedFrontier | None:
        """Shared by points of the same model axes and micro-batch per data rank: the data degree changes only the price of the
        state."""
        data = point.mesh.size_of(DATA_AXIS)
        key = point.mesh.axes[1:], self.graph.batch // point.micro_batches // data, data > 1
        if (key, fastest) not in self._frontiers:
            found = self._fastest_sharding(point) if fastest else None
            if not fastest and (known := self._frontier(point, fastest=True)) is not None:
                found = with_less_memory(known[0])
            self._frontiers[key, fastest] = None if found is None else (found, self._traced(found))
        return self._frontiers[key, fastest]

    def _traced(self, found: MemoryFrontier) -> TracedOptions:
        return TracedOptions.of(self.graph, found.options, found.problem.batch_costs)

    def _fastest_sharding(self, point: GridPoint) -> MemoryFrontier | None:
        problem = self.tables.problem(replace(point, zero_group=0), (0,), stage_cluster(self.cluster, point.stages))
        axes = forced_axes(problem.mesh, self.options.force)
        check_forced_axes(problem, axes)
        found = fastest_sharding(problem, self.seconds_left(), axes)
        if found is not None and (refusal := why_disobeyed(problem, found.sharding, axes)):
            self.refusal, found = refusal, None
        return found

    def _in_flight(self, point: GridPoint, option: ScheduleOption) -> tuple[float, ...]:
        """For each chunk, in the model's order: the peak of micro-batches in flight on its stage, on average over its chunks."""
        pipeline = Pipeline(point.stages, option.virtual, option.schedule)
        ranks = stage_of_chunks(pipeline)
        counts = [
            sum(micro_batches_in_flight(pipeline, stage, point.micro_batches, [1.0] * option.virtual))
            for stage in range(point.stages)
        ]
        return tuple(counts[rank] / option.virtual for rank in ranks)

    def _estimate(self, placed: PlacedPoint, option: ScheduleOption, usable_bytes: float | None = None) -> float:
        """Of the step, in seconds; without the memory constraint for infinite `usable_bytes`."""
        stages = placed.point.stages
        sent = sorted(next(iter(placed.tables.values())).sent_bytes[1:])
        middle = stages // 2  # its link spans the most devices
        link = stage_link(self.cluster, placed.point.mesh.size, middle - 1, middle)
        median = sent[len(sent) // 2] if sent else 0.0
        transfer = collective_seconds("point_to_point", median, link) if median else 0.0
        return min(
            tables.least_seconds(
                stages,
                option.virtual,
                option.in_flight,
                self._usable_bytes(placed.point, device) if usable_bytes is None else usable_bytes,
                option.bubble_passes,
                option.transfers * transfer,
            )
            for device, tables in placed.tables.items()
        )

    def solve_point(self, point: GridPoint, option: ScheduleOption) -> MeshSolution | None:
        """The point under one schedule: partitioned, priced, and partitioned with a smaller budget where it does not fit. None
        where no partition fits."""
        placed = self.place(point)
        if placed is None:
            return None
        margin = 0.0
        for _ in range(_TRIES):
            made = self._partition(placed, option, margin)
            if made is None:
                break
            graph, candidate, originals = made
            found = self._price(graph, candidate, placed, originals)
            if found.fits:
                return self._solution(point, option, graph, candidate, found)
            margin += 1.02 * (found.peak_memory_bytes - found.memory_budget_bytes)
        return None

    def solve_with_least_memory(self, point: GridPoint, option: ScheduleOption) -> MeshSolution | None:
        """The point under one schedule with the partition whose fullest stage takes least memory, whether that fits or not. None
        where it cannot be placed or partitioned."""
        placed = self.place(point)
        if placed is None:
            return None
        ranks = stage_of_chunks(Pipeline(point.stages, option.virtual, option.schedule))
        devices = [part.device for part in stage_clusters(self.cluster, point.stages)]
        every = {device: tables.range_options() for device, tables in placed.tables.items()}
        chunks = [
            (every[devices[rank]], count, self._usable_bytes(point, devices[rank]))
            for rank, count in zip(ranks, self._in_flight(point, option), strict=True)
        ]
        spare = spare_bytes(chunks, self._allowed_ranges(), option.virtual)
        made = self._partition(placed, option, spare - 1) if spare is not None else None
        if made is None:
            return None
        graph, candidate, originals = made
        return self._solution(point, option, graph, candidate, self._price(graph, candidate, placed, originals))

    def _solution(
        self, point: GridPoint, option: ScheduleOption, graph: Graph, candidate: Candidate, found: Evaluation
    ) -> MeshSolution:
        return MeshSolution(
            mesh=point.mesh,
            status=Status.FEASIBLE if found.fits else Status.INFEASIBLE,
            bound_seconds=0.0,
            objective_seconds=found.step_seconds,
            candidate=candidate,
            evaluation=found,
            micro_batches=point.micro_batches,
            zero_group=point.zero_group,
            stages=point.stages,
            virtual=option.virtual,
            schedule=option.schedule,
            graph=graph,
        )

    def _price(self, graph: Graph, candidate: Candidate, placed: PlacedPoint, originals: dict[str, str]) -> Evaluation:
        given = placed.costs.get(self.cluster.device, {})
        costs = {name: given[original] for name, original in originals.items() if original in given}
        return evaluate(graph, candidate, self.cluster, self.options.optimizer, costs)

    def _partition(
        self, placed: PlacedPoint, option: ScheduleOption, margin_bytes: float
    ) -> tuple[Graph, Candidate, dict[str, str]] | None:
        """(graph with a block for each distinct plan, candidate, the original block of each), for the memory budget of the
        devices without `margin_bytes`. None where no partition fits."""
        point = placed.point
        for device, tables in placed.tables.items():
            if (point, device) not in self._ranges:
                self._ranges[point, device] = tables.range_options()
        ranks = stage_of_chunks(Pipeline(point.stages, option.virtual, option.schedule))
        parts = stage_clusters(self.cluster, point.stages)
        keys = [(parts[rank].device, count) for rank, count in zip(ranks, self._in_flight(point, option), strict=True)]
        made = {
            (device, count): best_ranges(
                self._ranges[point, device],
                count,
                self._usable_bytes(point, device) - margin_bytes,
                self._allowed_ranges(),
                option.virtual,
            )
            for device, count in set(keys)
        }
        each = [made[key] for key in keys]
        each = [each[0], *(self._with_sends(placed, one, *pair) for one, pair in zip(each[1:], pairwise(ranks), strict=True))]
        ranges = self._ranges[point, keys[0][0]]
        # a stage computes all of its chunks
        cut = best_partition(
            [one.load_seconds * option.virtual for one in each], [one.pass_seconds for one in each], option.bubble_passes
        )
        if cut is None:
            return None
        plans = []
        for one, first, end in zip(each, cut.edges, cut.edges[1:], strict=False):
            number, zero = ranges.names[int(one.choice[first, end])]
            block_plans = placed.frontier.options[number]
            plans += [replace(block_plans[call.block], zero=zero) for call in self.graph.calls[first:end]]
        graph, blocks, originals = with_stage_variants(self.graph, plans)
        pipeline = Pipeline(point.stages, option.virtual, option.schedule, cuts=cut.edges[1:-1])
        candidate = Candidate(
            mesh=point.mesh,
            blocks=blocks,
            batch=self.graph.batch,
            precision=self.options.precision,
            micro_batches=point.micro_batches,
            zero_group=point.zero_group,
            pipeline=pipeline,
        )
        costs = next(iter(placed.costs.values()))
        priced = {name: costs[original] for name, original in originals.items()}
        repeated = values_worth_repeating(graph, candidate, self.cluster, priced)
        candidate = replace(candidate, pipeline=replace(pipeline, repeated=repeated))
        verify_candidate(graph, candidate, self.cluster.size)
        return graph, candidate, originals

    def _with_sends(self, placed: PlacedPoint, ranges: BestRanges, before: int, rank: int) -> BestRanges:
        """Of a chunk on stage `rank` that follows one on stage `before`."""
        if before == rank:
            return ranges
        tables = next(iter(placed.tables.values()))
        link = stage_link(self.cluster, placed.point.mesh.size, before, rank)
        seconds = [collective_seconds("point_to_point", size, link) if size else 0.0 for size in tables.sent_bytes]
        return with_sends(ranges, seconds, placed.point.micro_batches)

    @staticmethod
    def _usable_bytes(point: GridPoint, device: Device) -> float:
        """What the tensors of a stage may reserve."""
        return tensor_budget_bytes(device, communicator_count(point.mesh, point.zero_group, point.stages))

    def _allowed_ranges(self) -> Matrix:
        if self._allowed is None:
            self._allowed = allowed_ranges(self.graph)
        return self._allowed
