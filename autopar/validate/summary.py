"""The measures of a validation: errors of time, order and regret within sweeps, errors of memory, and a null model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import mean, median
from typing import Any

from autopar.validate.rows import Row

DIFFERENT = 0.10
"""A pair of runs counts for the order if their measured device-seconds per token differ by more than this share."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured row beside its predicted time and memory (`least_bytes`: what it cannot do without), or the reason why there is
    no prediction."""

    row: Row
    predicted_seconds: float | None
    predicted_bytes: float | None = None
    skipped: str = ""
    least_bytes: float | None = None

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1`` of the step time."""
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
class TimeErrors:
    """Errors of time, as shares; None where no row counts. `pairs` and `sweeps` are the numbers of those that count."""

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


def time_errors(points: Sequence[Comparison]) -> TimeErrors:
    """The errors of time of all rows.

    `dense_median` is the median over sources of the median error of a source's dense rows; `dense_p90` is over all dense rows;
    `order_accuracy` is the mean over sources; regret is of sweeps of at least two distinct configurations.
    """
    dense = [point for point in points if point.error is not None and not point.is_moe]
    moe = [abs(point.error) for point in points if point.error is not None and point.is_moe]
    sources: dict[str, list[float]] = {}
    for point in dense:
        sources.setdefault(point.row.source, []).append(abs(point.error or 0.0))
    right: dict[str, list[float]] = {}
    for sweep in sweeps(points):
        if found := ordered_pairs(sweep):
            right.setdefault(sweep[0].row.source, []).extend(found)
    regrets = [regret(sweep) for sweep in map(distinct, sweeps(points)) if len(sweep) >= 2]
    return TimeErrors(
        dense_median=median(map(median, sources.values())) if sources else None,
        dense_p90=percentile([abs(point.error or 0.0) for point in dense], 0.9),
        moe_median=median(moe) if moe else None,
        order_accuracy=sum(map(mean, right.values())) / len(right) if right else None,
        regret_mean=sum(regrets) / len(regrets) if regrets else None,
        regret_max=max(regrets, default=None),
        dense_rows=len(dense),
        dense_sources=len(sources),
        moe_rows=len(moe),
        pairs=sum(map(len, right.values())),
        sweeps=len(regrets),
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """The percentile, interpolated linearly between the two nearest values; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def sweeps(points: Iterable[Comparison]) -> list[list[Comparison]]:
    """Groups of several rows of one source, model, device, sequence length, precision and number of devices."""
    found: dict[object, list[Comparison]] = {}
    for point in points:
        row = point.row
        if point.error is not None:
            key = row.source, row.model_family, row.gpu, row.seq_len, row.precision, row.n_gpus
            found.setdefault(key, []).append(point)
    return [sweep for sweep in found.values() if len(sweep) > 1]


_CHOSEN = (
    *("dp", "tp", "pp", "virtual_pp", "cp", "ep", "zero_stage_or_fsdp", "zero_group_size", "sequence_parallel", "act_ckpt"),
    *("micro_batch", "global_batch", "compiled", "async_tp", "ep_overlap"),
)
"""The columns that tell how a model was trained; rows of a sweep that agree in them are one configuration, measured again.
(What a model is made of, heads say, is no choice either: it differs in rows of one sweep only where a source compares models.)"""


def distinct(sweep: Sequence[Comparison]) -> list[Comparison]:
    """The sweep with one point for each configuration and shape of the model: the means of what was measured and predicted."""
    found: dict[object, list[Comparison]] = {}
    for point in sweep:
        row = point.row
        shape = (row.layers, row.hidden, row.heads, row.kv_heads, row.ffn_hidden, row.vocab)
        found.setdefault((shape, *(getattr(row, name) for name in _CHOSEN)), []).append(point)
    out = []
    for same in found.values():
        seconds = mean(point.row.step_seconds or 0.0 for point in same)
        out.append(
            replace(
                same[0],
                row=replace(same[0].row, step_seconds=seconds),
                predicted_seconds=mean(point.predicted_seconds or 0.0 for point in same),
            )
        )
    return out


def _costs(point: Comparison) -> tuple[float, float]:
    """Device-seconds per token: measured, predicted."""
    row = point.row
    each = (row.n_gpus or 1) / (row.tokens_per_step or (row.global_batch or 1) * (row.seq_len or 1))
    return (row.step_seconds or 0.0) * each, (point.predicted_seconds or 0.0) * each


def ordered_pairs(sweep: Sequence[Comparison]) -> list[float]:
    """Return, for each pair that differs by more than `DIFFERENT`: 1 if the prediction has the same order, 0 if it has the
    opposite one, and 0.5 if the predictions are equal (as a coin would score)."""
    out: list[float] = []
    for one, two in combinations(map(_costs, sweep), 2):
        slow, fast = max(one[0], two[0]), min(one[0], two[0])
        if slow > fast * (1 + DIFFERENT):
            agree = (one[0] - two[0]) * (one[1] - two[1])
            out.append(0.5 if agree == 0 else float(agree > 0))
    return out


def regret(sweep: Sequence[Comparison]) -> float:
    """Return by how much the row that is predicted to be the fastest is slower than the fastest; of a tie, the slowest."""
    costs = [_costs(point) for point in sweep]
    chosen = min(predicted for _, predicted in costs)
    return max(measured for measured, predicted in costs if predicted == chosen) / min(measured for measured, _ in costs) - 1


# -- memory


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """Errors of memory of the rows that were measured in one way, as shares."""

    rows: int
    median: float | None
    p90: float | None
    worst: float | None


def measure_of(row: Row) -> str:
    """Return how the memory of a row was measured: ``allocated``, ``reserved``, ``nvidia_smi`` or ``unstated``."""
    text = row.memory_measure.lower()
    if "nvidia-smi" in text:
        return "nvidia_smi"
    if "or reserved not stated" in text or not text:
        return "unstated"
    return "reserved" if "reserved" in text else "allocated" if "allocated" in text else "unstated"


UNSURE = 0.01
"""The error with which allocated bytes are predicted (the median error of the runs that measured it): a run is *sure* to be out
of memory where it lacks more than this share of the device."""


def memory_errors(points: Sequence[Comparison], capacity: Callable[[Comparison], float]) -> dict[str, Any]:
    """Errors of memory by way of measuring; and of the runs that were out of memory, how many are predicted to be (`capacity` in
    bytes)."""
    found: dict[str, list[float]] = {"allocated": [], "reserved": [], "nvidia_smi": [], "unstated": []}
    for point in points:
        if point.memory_error is not None:
            found[measure_of(point.row)].append(abs(point.memory_error))
    out: dict[str, Any] = {
        name: asdict(MemoryErrors(len(each), median(each) if each else None, percentile(each, 0.9), max(each, default=None)))
        for name, each in found.items()
    }
    predicted = [p for p in points if p.predicted_bytes is not None]
    failed = [p for p in predicted if p.row.out_of_memory]
    ran = [p for p in predicted if p.row.step_seconds is not None]
    out["out_of_memory"] = {
        "rows": len(failed),
        "told": sum((p.least_bytes or 0.0) > (1 + UNSURE) * capacity(p) for p in failed),
        "ran": len(ran),
        "ran_but_predicted_not_to_fit": sum((p.least_bytes or 0.0) > (1 + UNSURE) * capacity(p) for p in ran),
    }
    return out


def null_model(points: Sequence[Comparison], ideal_seconds: Mapping[str, float]) -> tuple[float, TimeErrors]:
    """The null model: one constant utilisation for all rows, the median of the measured ones, and its errors of time.

    `ideal_seconds` by row id is the time at the peak FLOP/s of the data sheet.
    """
    shares = [ideal_seconds[p.row.id] / p.row.step_seconds for p in points if p.row.id in ideal_seconds and p.row.step_seconds]
    share = median(shares) if shares else 1.0
    guessed = [
        Comparison(p.row, ideal_seconds[p.row.id] / share if p.row.id in ideal_seconds else None) for p in points if not p.skipped
    ]
    return share, time_errors(guessed)
