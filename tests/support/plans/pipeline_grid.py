"""All pipelines of a grid, each of which is to be bounded or solved."""

from __future__ import annotations

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.solve.pipeline.pipeline_bounds import PipelineBounds
from autopar.solve.pipeline.pipeline_search import PipelineSearch
from autopar.solve.search_state import SearchState
from autopar.solve.space.options import SearchOptions


class PipelineGrid(PipelineBounds):
    """The points of the grid that are pipelines, with their bounds, tables and the stage search."""

    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> None:
        state = SearchState(graph, cluster, options, lambda line: None)
        state.list_points()
        super().__init__(state)
        self.points = [each.point for each in state.pipeline_points]
        self.problem = state.problem
        self.stage_search = PipelineSearch(state).stage_search
