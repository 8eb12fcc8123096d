"""Between which calls of a graph a pipeline may be cut."""

from __future__ import annotations

import numpy

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.pipeline.stage_values import check_chunk_borders, crossing_values
from autopar.solve.pipeline.stage_partition import Matrix


def allowed_ranges(graph: Graph) -> Matrix:
    """``[first, end]``: whether ``calls[first:end]`` may be a chunk."""
    calls = len(graph.calls)
    good = numpy.array([True, *(_may_cut(graph, index) for index in range(1, calls)), True])
    return good[:, None] & good[None, :]


def _may_cut(graph: Graph, index: int) -> bool:
    """Something with a gradient crosses (where there is any), and nothing but values does."""
    chunks = (tuple(range(index)), tuple(range(index, len(graph.calls))))
    try:
        check_chunk_borders(graph, chunks)
    except PlanError:
        return False
    (names,) = crossing_values(graph, chunks)
    return bool(names) and (graph.forward_only or any(map(graph.differentiable, names)))
