"""The default of the memory margin (`hardware.allocator.MEMORY_MARGIN`): from what published runs took beside what is predicted.

A run that takes ``1 + r`` times its prediction fits where the prediction is at most ``1 / (1 + r)`` of the memory. So a plan that
leaves ``r / (1 + r)`` of it free, where ``r`` is exceeded by one run in fifty, runs out of memory in one case of fifty at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.software.residuals import quantile
from autopar.validate.rows import Row
from autopar.validate.summary import Comparison, measure_of

RUNS_OUT = 0.02
"""The share of plans that may run out of memory."""


def source_of(row: Row) -> str:
    """The repository or paper of a row, without commit and place in it."""
    return row.source.partition("@")[0].partition(":")[0]


def memory_residuals(points: Iterable[Comparison]) -> list[tuple[str, float]]:
    """(source, ``measured / predicted - 1``) of the runs of which the source says what it measured."""
    return [
        (source_of(point.row), measured / point.predicted_bytes - 1)
        for point in points
        if point.predicted_bytes and (measured := point.row.measured_memory_bytes) and measure_of(point.row) != "unstated"
    ]


def margin_of(points: Iterable[Comparison]) -> float:
    """The memory margin under which at most `RUNS_OUT` of the runs would take more than the memory."""
    exceeded = max(0.0, quantile(memory_residuals(points), 1 - RUNS_OUT))
    return exceeded / (1 + exceeded)


def all_residuals(points: Sequence[Comparison]) -> dict[str, list[tuple[str, float]]]:
    """Residuals of memory and of steps as `software.residuals` keeps them, to four digits."""
    steps: dict[str, list[tuple[str, float]]] = {"dense": [], "mixtures": []}
    for point in points:
        if point.error is not None:
            kind = "mixtures" if point.row.n_experts else "dense"
            steps[kind].append((source_of(point.row), round(1 / (1 + point.error) - 1, 4)))
    return {"memory": [(source, round(value, 4)) for source, value in memory_residuals(points)], **steps}
