"""The stage search: placements of the blocks are solved once for each stage mesh and micro-batch, a dynamic program partitions
the calls into model chunks, and the evaluator prices the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.allocator import communicator_count, tensor_budget_bytes
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import slice_forward_seconds
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.pipeline_clock import micro_batches_in_flight
from autopar.cost_models.step.stage_devices import send_seconds, stage_clusters, stage_link
from autopar.ir.graph import Graph
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import crossing_values, joined_slices, repeatable_values
from autopar.ir.pipeline.stage_variants import with_stage_variants
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.verify import verify_candidate
from autopar.schedules.pipeline_schedule import stage_of_chunks
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.pipeline.stage_choices import StageChoices, StagePlan
from autopar.solve.pipeline.stage_cuts import CutClock, move_calls
from autopar.solve.pipeline.stage_partition import Matrix, allowed_ranges, best_partition
from autopar.solve.pipeline.stage_placement import PlacedPoint, StagePlacement
from autopar.solve.pipeline.stage_tables import RangeOptions, best_ranges, spare_bytes, with_sends
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import ScheduleOption
from autopar.solve.space.problem_tables import ProblemTables

_ATTEMPTS = 3
"""Attempts to partition a pipeline that does not fit by the evaluator, with smaller and smaller memory budgets."""


def _bytes_left(evaluation: Evaluation) -> list[float]:
    """Return what each stage leaves of its memory budget; negative where it does not fit."""
    return [each.budget_bytes - each.peak_bytes for each in evaluation.stage_memory]


class StageSearch:
    """The stage search of one graph on one cluster. `seconds_left` says how long the search may still run."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, tables: ProblemTables, seconds_left: Callable[[], float]
    ) -> None:
        self.graph, self.cluster, self.options, self.tables, self.seconds_left = graph, cluster, options, tables, seconds_left
        self.placement = StagePlacement(graph, cluster, options, tables, seconds_left)
        self._ranges: dict[tuple[GridPoint, bool], dict[Device, RangeOptions]] = {}
        self._allowed: Matrix | None = None

    def placed(self, point: GridPoint, option: ScheduleOption) -> PlacedPoint | None:
        """Place the blocks of a point, priced as they run under one of its schedules; None where time ends first."""
        return self.placement.place(point, split_backward=self.runs_apart(option))

    def runs_apart(self, option: ScheduleOption) -> bool:
        """Return whether blocks may run otherwise than under most schedules: compiled ones whose backward is split."""
        return option.splits_backward and self.cluster.device.fused

    def _chunks(self, point: GridPoint, option: ScheduleOption) -> list[tuple[int, Device, float]]:
        """Return for each chunk, in order, its stage, the device of that, and the peak of micro-batches in flight there, on
        average over its chunks."""
        pipeline, parts = Pipeline(point.stages, option.virtual, option.schedule), stage_clusters(self.cluster, point.stages)
        counts = [
            sum(micro_batches_in_flight(pipeline, stage, point.micro_batches, [1.0] * option.virtual))
            for stage in range(point.stages)
        ]
        return [(rank, parts[rank].device, counts[rank] / option.virtual) for rank in stage_of_chunks(pipeline)]

    def _range_options(self, placed: PlacedPoint, option: ScheduleOption) -> dict[Device, RangeOptions]:
        """Return the options of a point's ranges of calls on each of its devices."""
        key = placed.point, self.runs_apart(option)
        if key not in self._ranges:
            self._ranges[key] = {device: tables.range_options() for device, tables in placed.tables.items()}
        return self._ranges[key]

    def estimate(self, placed: PlacedPoint, option: ScheduleOption, usable_bytes: float | None = None) -> float:
        """Estimate the step in seconds; without the memory constraint for infinite `usable_bytes`."""
        stages = placed.point.stages
        sent = sorted(next(iter(placed.tables.values())).sent_bytes[1:])
        middle = stages // 2  # its link spans the most devices
        link = stage_link(self.cluster, placed.point.mesh.size, middle - 1, middle)
        median = sent[len(sent) // 2] if sent else 0.0
        transfer = collective_seconds("point_to_point", median, link) if median else 0.0

        def least(bubble_passes: float, transfer: float) -> float:
            return min(
                tables.least_seconds(
                    stages,
                    option.virtual,
                    option.in_flight,
                    self._usable_bytes(placed.point, device) if usable_bytes is None else usable_bytes,
                    bubble_passes,
                    option.transfers * transfer,
                )
                for device, tables in placed.tables.items()
            )

        shared = self.cluster.device.ranks_per_core
        if shared > 1:  # as `schedules.shared_cores` at least
            return max(least(0.0, 0.0), least(option.bubble_passes, shared * transfer) / shared)
        return least(option.bubble_passes, transfer)

    def solve_point(self, point: GridPoint, option: ScheduleOption, rival_seconds: float = 0.0) -> PricedPlan | None:
        """Partition and price the point under one schedule, and partition it with a smaller budget where it does not fit. None
        where no partition fits. Where the step may come below `rival_seconds` by it, calls take plans of their own, to use all of
        the memory, and move between chunks."""
        placed = self.placed(point, option)
        if placed is None:
            return None
        margin = 0.0
        for _ in range(_ATTEMPTS):
            plan = self._partition(placed, option, margin)
            if plan is None:
                break
            found = self._priced(placed, option, plan)
            if found.evaluation.fits:
                return self._with_spare_memory(placed, option, plan, found, rival_seconds)
            margin += 1.02 * (found.evaluation.peak_memory_bytes - found.evaluation.memory_budget_bytes)
        return None

    def _with_spare_memory(
        self, placed: PlacedPoint, option: ScheduleOption, plan: StagePlan, found: PricedPlan, rival_seconds: float
    ) -> PricedPlan:
        """Return the plan with faster choices of calls in the memory that it leaves free, under its own ZeRO stages or one for
        all, and with the cuts that suit them. The tables' estimates of that are corrected by what the evaluator says of a plan
        that uses it."""
        point, chunks = placed.point, self._chunks(placed.point, option)
        ranks = [rank for rank, _, _ in chunks]
        tables = [placed.tables[part.device] for part in stage_clusters(self.cluster, point.stages)]
        memory = StageChoices(tables, ranks, [count for _, _, count in chunks])
        pipeline = Pipeline(point.stages, option.virtual, option.schedule)
        sends = [self._send_seconds(placed, *pair) or [0.0] * len(self.graph.calls) for pair in pairwise(ranks)]
        cuts = [place for place, allowed in enumerate(self._allowed_ranges()[0]) if allowed]
        own = tuple(zero for _, zero in plan.choices)
        best, left = found, _bytes_left(found.evaluation)
        for zeros in dict.fromkeys((own, *((zero,) * len(own) for _, zero in tables[0].names))):
            edges, budget = plan.edges, [sum(each) for each in zip(memory.stage_bytes(plan), left, strict=True)]
            for attempt in range(_ATTEMPTS):
                fuller = memory.fastest(edges, zeros, budget)
                rival_seconds = min(rival_seconds, best.evaluation.step_seconds)
                if fuller is None or memory.busiest_seconds(fuller) >= rival_seconds:
                    break
                if not attempt:
                    seconds = memory.call_seconds(fuller)
                    clock = CutClock.of(pipeline, point.micro_batches, seconds, sends, self.cluster.device.ranks_per_core)
                    edges = move_calls(edges, clock, cuts)
                    fuller = memory.fastest(edges, zeros, budget)
                    if fuller is None or clock.step_seconds(edges) >= rival_seconds:
                        break
                other = self._priced(placed, option, fuller)
                if other.evaluation.fits:
                    best = min(best, other, key=lambda each: each.evaluation.step_seconds)
                    break
                spare = _bytes_left(other.evaluation)
                budget = [each + (more if more > 0 else 1.05 * more) for each, more in zip(budget, spare, strict=True)]
        return best

    def solve_with_least_memory(self, point: GridPoint, option: ScheduleOption) -> PricedPlan | None:
        """The point under one schedule with the partition whose fullest stage takes least memory, whether that fits or not. None
        where it cannot be placed or partitioned."""
        placed = self.placed(point, option)
        if placed is None:
            return None
        every, chunks = self._range_options(placed, option), self._chunks(point, option)
        ranges = [(every[device], count, self._usable_bytes(point, device)) for _, device, count in chunks]
        spare = spare_bytes(ranges, self._allowed_ranges(), option.virtual)
        plan = self._partition(placed, option, spare - 1) if spare is not None else None
        return None if plan is None else self._priced(placed, option, plan)

    def _partition(self, placed: PlacedPoint, option: ScheduleOption, margin_bytes: float) -> StagePlan | None:
        """Return the best partition for the memory budget of the devices without `margin_bytes`. None where none fits."""
        point, every, chunks = placed.point, self._range_options(placed, option), self._chunks(placed.point, option)
        options_by_stage = {
            (device, count): best_ranges(
                every[device],
                count,
                self._usable_bytes(point, device) - margin_bytes,
                self._allowed_ranges(),
                option.virtual,
            )
            for device, count in {(device, count) for _, device, count in chunks}
        }
        each = [options_by_stage[device, count] for _, device, count in chunks]
        ranks = [rank for rank, _, _ in chunks]
        sends = [[], *(self._send_seconds(placed, *pair) for pair in pairwise(ranks))]
        each = [with_sends(one, to, point.micro_batches) if to else one for one, to in zip(each, sends, strict=True)]
        # a stage computes all of its chunks
        cut = best_partition(
            [one.load_seconds * option.virtual for one in each], [one.pass_seconds for one in each], option.bubble_passes
        )
        if cut is None:
            return None
        choices = [
            every[chunks[0][1]].names[int(one.choice[first, end])]
            for one, (first, end) in zip(each, pairwise(cut.edges), strict=True)
            for _ in range(first, end)
        ]
        return StagePlan(cut.edges, tuple(choices))

    def _priced(self, placed: PlacedPoint, option: ScheduleOption, plan: StagePlan) -> PricedPlan:
        """Return the plan with a block for each distinct plan of a call, and its price."""
        point, known_costs = placed.point, placed.costs.get(self.cluster.device, {})
        plans = [
            replace(placed.frontier.options[number][call.block], zero=zero)
            for call, (number, zero) in zip(self.graph.calls, plan.choices, strict=True)
        ]
        graph, blocks, originals = with_stage_variants(self.graph, plans)
        pipeline = Pipeline(point.stages, option.virtual, option.schedule, cuts=plan.edges[1:-1])
        candidate = replace(point.candidate(blocks, self.graph.batch, self.options.precision), pipeline=pipeline)
        costs = next(iter(placed.costs.values()))
        priced = {name: costs[original] for name, original in originals.items()}
        repeated = values_worth_repeating(graph, candidate, self.cluster, priced)
        candidate = replace(candidate, pipeline=replace(pipeline, repeated=repeated))
        verify_candidate(graph, candidate, self.cluster.size)
        costs = {name: known_costs[original] for name, original in originals.items() if original in known_costs}
        return PricedPlan(candidate, evaluate(graph, candidate, self.cluster, self.options.optimizer, costs), graph)

    def _send_seconds(self, placed: PlacedPoint, before: int, rank: int) -> list[float]:
        """Return the seconds of a transfer over a cut before each call from stage `before` to `rank`; nothing on one stage."""
        if before == rank:
            return []
        tables = next(iter(placed.tables.values()))
        link = stage_link(self.cluster, placed.point.mesh.size, before, rank)
        return [collective_seconds("point_to_point", size, link) if size else 0.0 for size in tables.sent_bytes]

    @staticmethod
    def _usable_bytes(point: GridPoint, device: Device) -> float:
        """Return the bytes that the tensors of a stage may reserve."""
        return tensor_budget_bytes(device, communicator_count(point.mesh, point.zero_group, point.stages))

    def _allowed_ranges(self) -> Matrix:
        if self._allowed is None:
            self._allowed = allowed_ranges(self.graph)
        return self._allowed


def values_worth_repeating(
    graph: Graph, candidate: Candidate, cluster: Cluster, costs: Mapping[str, BlockCosts]
) -> tuple[str, ...]:
    """Return the values (masks, rotary tables) that cross a cut, and that every stage computes itself instead of receiving: they
    are determined by inputs, and made in less time than they are sent, by the seconds of the nodes on every chunk that reads
    one, against its bytes over the link at each cut that it crosses."""
    chunks = chunk_calls(graph, candidate.pipeline)
    crossings = crossing_values(graph, chunks)
    repeatable = repeatable_values(graph)
    names = [name for name in repeatable if any(name in each for each in crossings)]
    if not names:
        return ()
    runs = {name: CallTrace.of(costs[name], candidate.block(name)) for name in costs}
    link = stage_link(cluster, candidate.mesh.size, 0, 1)
    out = []
    for name in names:
        readers = sum(any(name in graph.calls[index].inputs for index in chunk) for chunk in chunks[1:])
        making = readers * sum(slice_forward_seconds(graph, piece, runs) for piece in joined_slices(graph, [repeatable[name]]))
        others = {other for each in crossings for other in each if other != name}
        sending = sum(
            send_seconds(graph, runs, chunk[0], others, link)
            for chunk, each in zip(chunks[1:], crossings, strict=True)
            if name in each
        )
        if making <= sending:
            out.append(name)
    return tuple(out)
