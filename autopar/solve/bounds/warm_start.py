"""Warm starts: plans that fit, found quickly, with one sharding of all blocks and as much recomputation and state sharding as
needed.

Where the joint problem with the memory constraint is large, a warm start is the incumbent: points whose bound is not better are
pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.solve.bounds.memory_frontier import MemoryFrontier, memory_frontier
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.problem.forced_axes import forced_axes
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables


class WarmStart:
    """The warm starts of one graph on one cluster. Memory frontiers are cached: points with equal model axes and micro-batches
    share one."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, tables: ProblemTables, left: Callable[[], float]
    ) -> None:
        self.graph, self.cluster, self.options, self.tables, self.left = graph, cluster, options, tables, left
        self._frontiers: dict[object, MemoryFrontier | None] = {}

    def fastest_fitting(self, point: GridPoint) -> PricedPlan | None:
        """The fastest of its plans that fit, or None."""
        problem = self.tables.problem(point)
        frontier = self._frontier(point)
        if frontier is None:
            return None
        best: PricedPlan | None = None
        zeros = sorted(problem.zeros if point.mesh.size_of(DATA_AXIS) > 1 else (0,), reverse=True)
        for options in frontier.options:
            fitting = False
            for zero in zeros:  # least memory first
                blocks = tuple(replace(options[block.name], zero=zero) for block in self.graph.blocks)
                candidate = point.candidate(blocks, self.graph.batch, self.options.precision)
                priced = evaluate(self.graph, candidate, self.cluster, self.options.optimizer, problem.batch_costs)
                if not priced.fits:
                    break
                fitting = True
                if best is None or priced.step_seconds < best.evaluation.step_seconds:
                    best = PricedPlan(candidate, priced)
            if fitting:
                break  # options that save less are slower
        return best

    def _frontier(self, point: GridPoint) -> MemoryFrontier | None:
        """Return the frontier of the point's model axes and micro-batch: the data degree changes no price but that of state."""
        key = point.mesh.axes[1:], point.examples(self.graph.batch), point.mesh.size_of(DATA_AXIS) > 1
        if key not in self._frontiers:
            axes = forced_axes(point.mesh, self.options.force)
            self._frontiers[key] = memory_frontier(self.tables.problem(replace(point, zero_group=0), (0,)), self.left(), axes)
        return self._frontiers[key]
