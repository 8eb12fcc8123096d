"""Placements of the blocks on the mesh of one pipeline stage: solved once for each stage mesh and micro-batch, and priced on the
devices of each stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.stage_devices import stage_cluster, stage_clusters
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate
from autopar.solve.bounds.memory_frontier import BlockOptions, MemoryFrontier, fastest_sharding, with_less_memory
from autopar.solve.pipeline.stage_tables import StageSetting, StageTables, TracedOptions
from autopar.solve.problem.forced_axes import check_forced_axes, forced_axes, why_disobeyed
from autopar.solve.problem.pins import constraint_texts
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables


@dataclass(frozen=True, slots=True)
class FamilyPlacement:
    """The placements of the blocks on a stage mesh with one micro-batch size, without the tables: the options with the fastest
    one only, and with less memory (None: not asked for). `refusal`: as that of `StagePlacement`."""

    sharding: Candidate | None = None
    fastest: BlockOptions = ()
    less_memory: BlockOptions | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class PlacedPoint:
    """A point whose blocks are placed, and priced on the devices of each stage."""

    point: GridPoint
    frontier: MemoryFrontier
    costs: dict[Device, dict[str, BlockCosts]]
    tables: dict[Device, StageTables]


class StagePlacement:
    """The placements of one graph on one cluster. `refusal`: why the last sharding against a forced degree was left out."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, tables: ProblemTables, seconds_left: Callable[[], float]
    ) -> None:
        self.graph, self.cluster, self.options, self.tables, self.seconds_left = graph, cluster, options, tables, seconds_left
        self._frontiers: dict[object, MemoryFrontier | None] = {}
        self._traced: dict[object, TracedOptions] = {}
        self.refusal = ""

    def place(self, point: GridPoint, fastest: bool = False, split_backward: bool = False) -> PlacedPoint | None:
        """Place the blocks of a point; None where time ends first. `fastest`: with the option that saves all only.
        `split_backward`: as blocks run under a schedule that splits it (`costs_as_run`)."""
        frontier = self._frontier(point, fastest)
        if frontier is None:
            return None
        costs: dict[Device, dict[str, BlockCosts]] = {}
        tables: dict[Device, StageTables] = {}
        for part in stage_clusters(self.cluster, point.stages):
            if part.device not in costs:
                costs[part.device] = self._costs(frontier, point, part)
                runs = self._traced_options(point, frontier, fastest, split_backward)
                if part.device != frontier.problem.cluster.device:
                    runs = TracedOptions.of(self.graph, frontier.options, costs[part.device])
                    runs = runs.under_split_backward(self.graph) if split_backward else runs
                tables[part.device] = self._tables(point, part, runs, costs[part.device])
        return PlacedPoint(point, frontier, costs, tables)

    def family(self, point: GridPoint) -> object:
        """Return the model axes and micro-batch per data rank, of which points share their placements: the data degree changes
        only the price of the state."""
        return point.mesh.axes[1:], point.examples(self.graph.batch), point.mesh.size_of(DATA_AXIS) > 1

    def knows(self, point: GridPoint) -> bool:
        """Return whether the fastest placement of its family was looked for."""
        return (self.family(point), True) in self._frontiers

    def family_placement(self, point: GridPoint) -> FamilyPlacement:
        """Return the placements of the family of a point, for another process."""
        fastest, less = (self._frontiers.get((self.family(point), fastest)) for fastest in (True, False))
        if fastest is None:
            return FamilyPlacement(refusal=self.refusal)
        return FamilyPlacement(fastest.sharding, fastest.options, less.options if less else None)

    def learn(self, point: GridPoint, placement: FamilyPlacement) -> None:
        """Take what another process found for the family of a point."""
        if self.knows(point):
            return
        key, self.refusal = self.family(point), placement.refusal or self.refusal
        if placement.sharding is None:
            self._frontiers[key, True] = None
            return
        fastest = MemoryFrontier(self._problem(point), placement.sharding, placement.fastest)
        self._frontiers[key, True] = fastest
        if placement.less_memory is not None:
            self._frontiers[key, False] = replace(fastest, options=placement.less_memory)

    def _costs(self, frontier: MemoryFrontier, point: GridPoint, part: Cluster) -> dict[str, BlockCosts]:
        out = {}
        for name, table in frontier.problem.blocks.items():
            out[name] = BlockCosts(table.block, point.mesh, self.graph.batch // point.micro_batches, part, point.zero_group)
            out[name].share_with(table.costs)
        return out

    def _tables(self, point: GridPoint, part: Cluster, runs: TracedOptions, costs: dict[str, BlockCosts]) -> StageTables:
        zeros = self.options.zeros if point.mesh.size_of(DATA_AXIS) > 1 else (0,)
        setting = StageSetting(
            batch=self.graph.batch,
            micro_batches=point.micro_batches,
            precision=self.options.precision,
            optimizer=self.options.optimizer,
            device=part.device,
            overlap=part.overlap,
        )
        return StageTables(self.graph, runs, costs, zeros, setting)

    def _frontier(self, point: GridPoint, fastest: bool) -> MemoryFrontier | None:
        """Return the frontier that the points of a family share."""
        key = self.family(point)
        if (key, fastest) not in self._frontiers:
            frontier = self._fastest_sharding(point) if fastest else None
            if not fastest and (fastest_frontier := self._frontier(point, fastest=True)) is not None:
                frontier = with_less_memory(fastest_frontier)
            self._frontiers[key, fastest] = frontier
        return self._frontiers[key, fastest]

    def _traced_options(self, point: GridPoint, frontier: MemoryFrontier, fastest: bool, split_backward: bool) -> TracedOptions:
        """Return the traces that the points of a family share."""
        key = self.family(point), fastest, split_backward
        if key not in self._traced and split_backward:
            self._traced[key] = self._traced_options(point, frontier, fastest, False).under_split_backward(self.graph)
        elif key not in self._traced:
            self._traced[key] = TracedOptions.of(self.graph, frontier.options, frontier.problem.batch_costs)
        return self._traced[key]

    def _problem(self, point: GridPoint) -> Problem:
        return self.tables.problem(replace(point, zero_group=0), (0,), stage_cluster(self.cluster, point.stages))

    def _fastest_sharding(self, point: GridPoint) -> MemoryFrontier | None:
        problem = self._problem(point)
        axes = forced_axes(problem.mesh, self.options.force)
        check_forced_axes(problem, axes, constraint_texts(self.options.pins))
        frontier = fastest_sharding(problem, self.seconds_left(), axes)
        if frontier is not None and (refusal := why_disobeyed(problem, frontier.sharding, axes)):
            self.refusal, frontier = refusal, None
        return frontier
