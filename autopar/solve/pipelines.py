"""The search over pipelines: shardings and their options are solved once per stage mesh and micro-batch, stages are cut by
dynamic programming, and the most promising plans are priced by the evaluator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.devices import Device
from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.pipeline import held, part_of
from autopar.cost_models.stage_groups import stage_parts
from autopar.cost_models.stages import link_of_stages
from autopar.errors import AutoparError, PlanError
from autopar.ir.chunks import rank_of_chunks
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.stages import check_cuts, crossing
from autopar.ir.verify import verify_candidate
from autopar.solve.candidates import MeshResult
from autopar.solve.cutting import Matrix, best_cut
from autopar.solve.frontier import Frontier, frontier
from autopar.solve.grid import Point
from autopar.solve.ilp import Status
from autopar.solve.options import SearchOptions
from autopar.solve.pipeline_grid import Way, ways
from autopar.solve.repeated import repeated_values
from autopar.solve.stage_tables import Choices, Chosen, Runs, Setting, StageTables, chosen, with_sends
from autopar.solve.tables import Tables
from autopar.solve.variants import varied

_PRICED = 16
"""So many pipelines at most are cut and priced."""

_ALIKE = 4
"""And of one stage mesh and number of stages so many at most, unless one of them is the best."""

_NEAR = 1.04
"""Estimates that are not above the best plan by more than that are worth pricing."""

_TRIES = 3
"""How often a pipeline that does not fit by the evaluator is cut again with less memory."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A point whose blocks are placed, and priced on the devices of each stage."""

    point: Point
    frontier: Frontier
    costs: dict[Device, dict[str, BlockCosts]]
    tables: dict[Device, StageTables]


class Pipelines:
    """Of one graph on one cluster. `left` tells how many seconds the search still has."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, tables: Tables, left: Callable[[], float]
    ) -> None:
        self.graph, self.cluster, self.options, self.tables, self.left = graph, cluster, options, tables, left
        self._frontiers: dict[object, tuple[Frontier, Runs] | None] = {}
        self._choices: dict[tuple[Point, Device], Choices] = {}
        self._allowed: Matrix | None = None

    def promising(self, points: Sequence[Point], best_seconds: float) -> list[tuple[float, Point, Way]]:
        """About how long the step is of each point with each of its schedules, the shortest first. Half of the time is left to
        look closer at them."""
        out, half = [], self.left() / 2
        for point in points:
            if self.left() <= half:
                break
            try:
                ready = self.ready(point)
            except AutoparError:
                if self.options.force:
                    raise
                continue
            if ready is None:
                continue
            for way in ways(self.graph, point, self.options.force):
                seconds = self._about(ready, way)
                if seconds < best_seconds:
                    out.append((seconds, point, way))
        return sorted(out, key=lambda each: (each[0], each[1].stages, each[2].virtual))

    def solved(self, asked: Sequence[tuple[float, Point, Way]], best_seconds: float) -> Iterator[MeshResult]:
        """The pipelines that were asked for, cut and priced; those that fit."""
        tried: dict[object, int] = {}
        count = 0
        for seconds, point, way in asked:
            key = point.mesh, point.stages
            if seconds >= best_seconds * _NEAR or self.left() <= 0 or count >= _PRICED:
                return
            if tried.get(key, 0) >= _ALIKE:
                continue
            tried[key] = tried.get(key, 0) + 1
            count += 1
            result = self.solve(point, way)
            if result is not None:
                yield result
                if result.evaluation is not None and result.evaluation.step_seconds < best_seconds:
                    best_seconds, tried[key] = result.evaluation.step_seconds, 0

    # -- one point

    def ready(self, point: Point) -> Ready | None:
        """None where its blocks cannot be placed in time."""
        found = self._frontier(point)
        if found is None:
            return None
        costs: dict[Device, dict[str, BlockCosts]] = {}
        tables: dict[Device, StageTables] = {}
        for part in stage_parts(self.cluster, point.stages):
            if part.device not in costs:
                costs[part.device] = self._costs(found[0], point, part)
                runs = found[1]
                if part.device != found[0].problem.cluster.device:
                    runs = Runs.of(self.graph, found[0].options, costs[part.device])
                tables[part.device] = self._tables(point, part, runs, costs[part.device])
        return Ready(point, found[0], costs, tables)

    def _costs(self, found: Frontier, point: Point, part: Cluster) -> dict[str, BlockCosts]:
        out = {}
        for name, table in found.problem.blocks.items():
            out[name] = BlockCosts(
                table.block, point.mesh, self.graph.batch // point.micro_batches, part, point.zero_group
            )
            out[name].like(table.costs)
        return out

    def _tables(self, point: Point, part: Cluster, runs: Runs, costs: dict[str, BlockCosts]) -> StageTables:
        data = point.mesh.size_of(DATA_AXIS)
        zeros = self.options.zeros if data > 1 else (0,)
        setting = Setting(
            self.graph.batch, point.micro_batches, point.zero_group or data, self.options.precision, self.options.optimizer,
            part.device, part.overlap,
        )  # fmt: skip
        return StageTables(self.graph, runs, costs, zeros, setting)

    def _frontier(self, point: Point) -> tuple[Frontier, Runs] | None:
        """Of the model axes and the micro-batch of one data rank: the data degree changes no price but that of the state."""
        data = point.mesh.size_of(DATA_AXIS)
        key = point.mesh.axes[1:], self.graph.batch // point.micro_batches // data, data > 1
        if key not in self._frontiers:
            problem = self.tables.problem(replace(point, zero_group=0), (0,), part_of(self.cluster, point.stages))
            found = frontier(problem, self.left())
            self._frontiers[key] = None if found is None else (found, Runs.of(self.graph, found.options, problem.batch_costs))
        return self._frontiers[key]

    def _held(self, point: Point, way: Way) -> tuple[float, ...]:
        """Of each chunk, in the model's order: how many micro-batches its stage holds at most, on average over its chunks."""
        pipeline = Pipeline(point.stages, way.virtual, way.schedule)
        ranks = rank_of_chunks(pipeline)
        counts = [sum(held(pipeline, stage, point.micro_batches, [1.0] * way.virtual)) for stage in range(point.stages)]
        return tuple(counts[rank] / way.virtual for rank in ranks)

    def _about(self, ready: Ready, way: Way) -> float:
        stages = ready.point.stages
        sent = sorted(next(iter(ready.tables.values())).sent[1:])
        middle = stages // 2  # where the widest gap is
        link = link_of_stages(self.cluster, ready.point.mesh.size, middle - 1, middle)
        once = collective_seconds("point_to_point", sent[len(sent) // 2], link) if sent and sent[len(sent) // 2] else 0.0
        return min(
            tables.least_seconds(stages, way.virtual, way.held, device.room_bytes, way.waiting, way.trips * once)
            for device, tables in ready.tables.items()
        )

    def solve(self, point: Point, way: Way) -> MeshResult | None:
        """The stages of one point under one schedule, cut, priced, and cut again where they do not fit. None where nothing
        does."""
        ready = self.ready(point)
        if ready is None:
            return None
        margin = 0.0
        for _ in range(_TRIES):
            made = self._cut(ready, way, margin)
            if made is None:
                break
            graph, candidate, originals = made
            found = self._price(graph, candidate, ready, originals)
            if found.fits:
                return self._result(point, way, graph, candidate, found)
            margin += 1.02 * (found.peak_memory_bytes - found.memory_capacity_bytes)
        return None

    def _result(self, point: Point, way: Way, graph: Graph, candidate: Candidate, found: Evaluation) -> MeshResult:
        return MeshResult(
            point.mesh, Status.FEASIBLE if found.fits else Status.INFEASIBLE, 0.0, found.step_seconds, candidate, found,
            micro_batches=point.micro_batches, zero_group=point.zero_group, stages=point.stages, virtual=way.virtual,
            schedule=way.schedule, graph=graph,
        )  # fmt: skip

    def _price(self, graph: Graph, candidate: Candidate, ready: Ready, originals: dict[str, str]) -> Evaluation:
        given = ready.costs.get(self.cluster.device, {})
        costs = {name: given[original] for name, original in originals.items() if original in given}
        return evaluate(graph, candidate, self.cluster, self.options.optimizer, costs)

    def _cut(self, ready: Ready, way: Way, margin_bytes: float) -> tuple[Graph, Candidate, dict[str, str]] | None:
        """With so many bytes of every device left out."""
        point = ready.point
        for device, tables in ready.tables.items():
            if (point, device) not in self._choices:
                self._choices[point, device] = tables.choices()
        ranks = rank_of_chunks(Pipeline(point.stages, way.virtual, way.schedule))
        parts = stage_parts(self.cluster, point.stages)
        keys = [(parts[rank].device, count) for rank, count in zip(ranks, self._held(point, way), strict=True)]
        made = {
            (device, count): chosen(
                self._choices[point, device], count, device.room_bytes - margin_bytes, self.allowed(), way.virtual
            )
            for device, count in set(keys)
        }
        each = [made[key] for key in keys]
        each = [each[0], *(self._sending(ready, one, *pair) for one, pair in zip(each[1:], pairwise(ranks), strict=True))]
        of = self._choices[point, keys[0][0]]
        # a stage is busy with all of its chunks
        cut = best_cut([one.load * way.virtual for one in each], [one.once for one in each], way.waiting)
        if cut is None:
            return None
        plans = []
        for one, first, behind in zip(each, cut.edges, cut.edges[1:], strict=False):
            number, zero = of.names[int(one.choice[first, behind])]
            option = ready.frontier.options[number]
            plans += [replace(option[call.block], zero=zero) for call in self.graph.calls[first:behind]]
        graph, blocks, originals = varied(self.graph, plans)
        pipeline = Pipeline(point.stages, way.virtual, way.schedule, cuts=cut.edges[1:-1])
        candidate = Candidate(
            point.mesh, blocks, self.graph.batch, self.options.precision, point.micro_batches, point.zero_group, pipeline
        )
        costs = next(iter(ready.costs.values()))
        priced = {name: costs[original] for name, original in originals.items()}
        repeated = repeated_values(graph, candidate, self.cluster, priced)
        candidate = replace(candidate, pipeline=replace(pipeline, repeated=repeated))
        verify_candidate(graph, candidate, self.cluster.size)
        return graph, candidate, originals

    def _sending(self, ready: Ready, of: Chosen, before: int, rank: int) -> Chosen:
        """A chunk on `rank` behind one on the rank `before`."""
        if before == rank:
            return of
        tables = next(iter(ready.tables.values()))
        link = link_of_stages(self.cluster, ready.point.mesh.size, before, rank)
        seconds = [collective_seconds("point_to_point", size, link) if size else 0.0 for size in tables.sent]
        return with_sends(of, seconds, ready.point.micro_batches)

    def allowed(self) -> Matrix:
        """``[first, behind]``: whether a chunk may begin and end there."""
        if self._allowed is None:
            calls = len(self.graph.calls)
            good = numpy.array([True, *(self._may_cut(index) for index in range(1, calls)), True])
            self._allowed = good[:, None] & good[None, :]
        return self._allowed

    def _may_cut(self, index: int) -> bool:
        """Something with a gradient crosses, and nothing but values does."""
        chunks = (tuple(range(index)), tuple(range(index, len(self.graph.calls))))
        try:
            check_cuts(self.graph, chunks)
        except PlanError:
            return False
        (names,) = crossing(self.graph, chunks)
        return any(self._differentiable(name) for name in names)

    def _differentiable(self, name: str) -> bool:
        call = next(call for call in self.graph.calls if name in call.outputs)
        block = self.graph.block(call.block)
        return block.values()[block.outputs[call.outputs.index(name)]].differentiable
