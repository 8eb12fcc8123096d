"""The measures of the validation: errors, order and regret within sweeps, memory by how it was measured, and a null model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any

from autopar.validate.rows import Row

DIFFERENT = 0.10
"""A pair of runs counts for the order where their measured device-seconds per token differ by more."""


@dataclass(frozen=True, slots=True)
class Point:
    """A row with a prediction (seconds and bytes), or with the reason why there is none."""

    row: Row
    predicted_seconds: float | None
    predicted_bytes: float | None = None
    skipped: str = ""

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1`` of the step."""
        if self.predicted_seconds is None or not self.row.step_seconds:
            return None
        return self.predicted_seconds / self.row.step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """``predicted / measured - 1`` of the peak memory."""
        measured = self.row.measured_memory_bytes
        return self.predicted_bytes / measured - 1 if self.predicted_bytes is not None and measured else None

    @property
    def is_moe(self) -> bool:
        return self.row.n_experts is not None


@dataclass(frozen=True, slots=True)
class Times:
    """Shares, not percent; None where no row counts. `regrets` is the number of sweeps, `pairs` of pairs."""

    dense_median: float | None
    dense_p90: float | None
    moe_median: float | None
    order_accuracy: float | None
    regret_mean: float | None
    regret_max: float | None
    dense_rows: int
    dense_sources: int
    moe_rows: int
    pairs: int
    sweeps: int


def times(points: Sequence[Point]) -> Times:
    """All measures of time.

    `dense_median` is the median over sources of the median error of a source's dense rows; `dense_p90` is over dense rows.
    """
    dense = [point for point in points if point.error is not None and not point.is_moe]
    moe = [abs(point.error) for point in points if point.error is not None and point.is_moe]
    sources: dict[str, list[float]] = {}
    for point in dense:
        sources.setdefault(point.row.source, []).append(abs(point.error or 0.0))
    right = [pair for sweep in sweeps(points) for pair in ordered_pairs(sweep)]
    regrets = [regret(sweep) for sweep in sweeps(points) if len(sweep) >= 3]
    return Times(
        median(map(median, sources.values())) if sources else None,
        percentile([abs(point.error or 0.0) for point in dense], 0.9),
        median(moe) if moe else None,
        sum(right) / len(right) if right else None,
        sum(regrets) / len(regrets) if regrets else None,
        max(regrets, default=None),
        len(dense),
        len(sources),
        len(moe),
        len(right),
        len(regrets),
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def sweeps(points: Iterable[Point]) -> list[list[Point]]:
    """Rows of one source, model, device, sequence length, precision and number of devices."""
    found: dict[object, list[Point]] = {}
    for point in points:
        row = point.row
        if point.error is not None:
            key = row.source, row.model_family, row.gpu, row.seq_len, row.precision, row.n_gpus
            found.setdefault(key, []).append(point)
    return [sweep for sweep in found.values() if len(sweep) > 1]


def _costs(point: Point) -> tuple[float, float]:
    """Device-seconds per token: measured, predicted."""
    row = point.row
    each = (row.n_gpus or 1) / (row.tokens_per_step or (row.global_batch or 1) * (row.seq_len or 1))
    return (row.step_seconds or 0.0) * each, (point.predicted_seconds or 0.0) * each


def ordered_pairs(sweep: Sequence[Point]) -> list[float]:
    """Of each pair that differs by more than `DIFFERENT`: 1 where the prediction has the same order, 0 where it has the other,
    and a half where it is equal for both, which is what a coin would reach."""
    out: list[float] = []
    for one, two in combinations(map(_costs, sweep), 2):
        slow, fast = max(one[0], two[0]), min(one[0], two[0])
        if slow > fast * (1 + DIFFERENT):
            agree = (one[0] - two[0]) * (one[1] - two[1])
            out.append(0.5 if agree == 0 else float(agree > 0))
    return out


def regret(sweep: Sequence[Point]) -> float:
    """By how much the row that is predicted fastest is slower than the fastest; of rows predicted equal the slowest."""
    costs = [_costs(point) for point in sweep]
    chosen = min(predicted for _, predicted in costs)
    return max(measured for measured, predicted in costs if predicted == chosen) / min(measured for measured, _ in costs) - 1


# -- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Errors of the rows of one measure, as shares."""

    rows: int
    median: float | None
    p90: float | None
    worst: float | None


def measure_of(row: Row) -> str:
    """``allocated``, ``reserved``, ``nvidia_smi`` or ``unstated``."""
    text = row.memory_measure.lower()
    if "nvidia-smi" in text:
        return "nvidia_smi"
    if "or reserved not stated" in text or not text:
        return "unstated"
    return "reserved" if "reserved" in text else "allocated" if "allocated" in text else "unstated"


def memory(points: Sequence[Point], capacity: Callable[[Point], float]) -> dict[str, Any]:
    """Per measure, and for runs that did not fit whether that is predicted (`capacity` in bytes)."""
    found: dict[str, list[float]] = {"allocated": [], "reserved": [], "nvidia_smi": [], "unstated": []}
    for point in points:
        if point.memory_error is not None:
            found[measure_of(point.row)].append(abs(point.memory_error))
    out: dict[str, Any] = {
        name: asdict(Memory(len(each), median(each) if each else None, percentile(each, 0.9), max(each, default=None)))
        for name, each in found.items()
    }
    told = [p for p in points if p.predicted_bytes is not None]
    failed = [p for p in told if p.row.out_of_memory]
    ran = [p for p in told if p.row.step_seconds is not None]
    out["out_of_memory"] = {
        "rows": len(failed),
        "told": sum((p.predicted_bytes or 0.0) > capacity(p) for p in failed),
        "ran": len(ran),
        "ran_but_predicted_not_to_fit": sum((p.predicted_bytes or 0.0) > capacity(p) for p in ran),
    }
    return out


def null_model(points: Sequence[Point], ideal_seconds: Mapping[str, float]) -> tuple[float, Times]:
    """One constant utilisation for all rows, the best there is: the median of what was measured. `ideal_seconds` per row id is
    the time at the data sheet's peak."""
    shares = [ideal_seconds[p.row.id] / p.row.step_seconds for p in points if p.row.id in ideal_seconds and p.row.step_seconds]
    share = median(shares) if shares else 1.0
    guessed = [
        Point(p.row, ideal_seconds[p.row.id] / share if p.row.id in ideal_seconds else None) for p in points if not p.skipped
    ]
    return share, times(guessed)
