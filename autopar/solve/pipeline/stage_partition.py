"""The stage partition: a row of calls into model chunks, by dynamic programming over (chunk, end of the chunk).

A chunk's *load* is how long its stage computes it in a step, its *pass* one micro-batch through it. The objective is
``largest load + bubble passes x sum of passes``: the bottleneck stage, and filling and draining the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.pipeline.stage_values import check_chunk_borders, crossing_values

Matrix = Any
"""``[first call, end]`` of floats, as in ``calls[first:end]``; infinite where that cannot be a chunk."""

_LOAD_BOUNDS = 6
"""At most so many bounds on the largest load are tried, from the least one on."""


@dataclass(frozen=True, slots=True)
class StagePartition:
    """A partition: `edges` are the first calls of all chunks, and the number of calls; `seconds` is what was minimised."""

    edges: tuple[int, ...]
    seconds: float
    load_seconds: float


def best_partition(
    load_seconds: Sequence[Matrix], pass_seconds: Sequence[Matrix], bubble_passes: float, limits: int = _LOAD_BOUNDS
) -> StagePartition | None:
    """Return the best partition of chunks with these loads and passes, in the model's order. None where nothing fits.

    Exact where `limits` is not below the number of distinct loads: for each bound on the largest load, the least sum.
    """
    calls = load_seconds[0].shape[0] - 1
    best = numpy.full(calls + 1, numpy.inf)
    best[0] = 0.0
    for load in load_seconds:
        # least largest load up to here: best'[i] = min_j max(best[j], load[j, i])
        best = numpy.maximum(best[:, None], load).min(axis=0)
    least = float(best[calls])
    if not numpy.isfinite(least):
        return None
    best_cut: StagePartition | None = None
    for limit in _bounds(load_seconds, least, limits):
        cut = _least_sum(load_seconds, pass_seconds, limit, bubble_passes)
        if cut is not None and (best_cut is None or cut.seconds < best_cut.seconds):
            best_cut = cut
    return best_cut


def _bounds(loads: Sequence[Matrix], least: float, count: int) -> Sequence[float]:
    distinct = {id(each): each for each in loads}.values()
    every: Any = numpy.unique(numpy.concatenate([load[numpy.isfinite(load)] for load in distinct]))
    above = every[every >= least * (1 - 1e-12)]
    if len(above) <= count:
        return [float(each) for each in above]
    # the least, and then in steps of some percent
    spaced = [least * (1 + 0.02 * step**2) for step in range(count)]
    return [float(above[max(0, numpy.searchsorted(above, each * (1 + 1e-12), side="right") - 1)]) for each in spaced]


def _least_sum(loads: Sequence[Matrix], passes: Sequence[Matrix], limit: float, weight: float) -> StagePartition | None:
    """Return the partition with the least sum of passes where no load is above `limit`."""
    calls = loads[0].shape[0] - 1
    total = numpy.full(calls + 1, numpy.inf)
    total[0] = 0.0
    before = []
    for load, once in zip(loads, passes, strict=True):
        # total'[i] = min_j total[j] + pass[j, i], where load[j, i] <= limit
        sums = total[:, None] + numpy.where(load <= limit * (1 + 1e-12), once, numpy.inf)
        before.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    if not numpy.isfinite(total[calls]):
        return None
    edges = [calls]
    for chosen in reversed(before):
        edges.append(int(chosen[edges[-1]]))
    edges.reverse()
    largest = max(float(load[a, b]) for load, a, b in zip(loads, edges, edges[1:], strict=False))
    return StagePartition(tuple(edges), largest + weight * float(total[calls]), largest)


def allowed_ranges(graph: Graph) -> Matrix:
    """Return ``[first, end]``: whether ``calls[first:end]`` may be a chunk."""
    calls = len(graph.calls)
    good = numpy.array([True, *(_may_cut(graph, index) for index in range(1, calls)), True])
    return good[:, None] & good[None, :]


def _may_cut(graph: Graph, index: int) -> bool:
    """Return whether something with a gradient crosses (where there is any), and nothing but values does."""
    chunks = (tuple(range(index)), tuple(range(index, len(graph.calls))))
    try:
        check_chunk_borders(graph, chunks)
    except PlanError:
        return False
    (names,) = crossing_values(graph, chunks)
    return bool(names) and (graph.forward_only or any(map(graph.differentiable, names)))
