"""The report of a validation: all rows with predicted and measured cost, and the summary that ``autopar validate`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.validate.configuration import FLOAT8
from autopar.validate.memory_measures import least_bytes, predicted_bytes
from autopar.validate.price import PricedRow
from autopar.validate.summary import Comparison, TimeErrors, memory_errors, null_model, time_errors


@dataclass(frozen=True, slots=True)
class Report:
    """All rows and their errors. The null model predicts each step with one constant share of peak FLOP/s, `null_utilisation`."""

    priced: tuple[PricedRow, ...]
    points: tuple[Comparison, ...]
    times: TimeErrors
    memory: dict[str, Any]
    null_times: TimeErrors
    null_utilisation: float

    def document(self) -> dict[str, Any]:
        """The JSON document: every row of the table, and the summary."""
        skipped = sum(bool(each.skipped) for each in self.priced)
        summary = {"expressed": len(self.priced) - skipped, "skipped": skipped, **asdict(self.times), "memory": self.memory}
        summary["null_model"] = {"utilisation": self.null_utilisation, **asdict(self.null_times)}
        return {"rows": [_row(each, point) for each, point in zip(self.priced, self.points, strict=True)], "summary": summary}


def _row(each: PricedRow, point: Comparison) -> dict[str, Any]:
    row = each.row
    return {
        "id": row.id,
        "source": row.source,
        "predicted_step_seconds": point.predicted_seconds,
        "measured_step_seconds": row.step_seconds,
        "error": point.error,
        "predicted_memory_bytes": None if point.predicted_bytes is None else round(point.predicted_bytes),
        "measured_memory_bytes": None if row.measured_memory_bytes is None else round(row.measured_memory_bytes),
        "memory_error": point.memory_error,
        "out_of_memory": row.out_of_memory,
        "assumed": list(each.assumed),
        "skipped": each.skipped or None,
    }


def report(priced: Sequence[PricedRow]) -> Report:
    """The report of rows that `price.price_rows` priced."""
    points = tuple(map(_point, priced))
    capacities = {each.row.id: float(each.evaluation.memory_capacity_bytes) for each in priced if each.evaluation}
    ideal = {each.row.id: seconds for each in priced if (seconds := _ideal_seconds(each))}
    share, guessed = null_model(points, ideal)
    found = memory_errors(points, lambda point: capacities[point.row.id])
    return Report(
        priced=tuple(priced), points=points, times=time_errors(points), memory=found, null_times=guessed, null_utilisation=share
    )


def _point(each: PricedRow) -> Comparison:
    if each.evaluation is None:
        return Comparison(each.row, None, None, each.skipped)
    found = each.evaluation
    return Comparison(each.row, found.step_seconds, predicted_bytes(each.row, found), least_bytes=least_bytes(each.row, found))


def _ideal_seconds(each: PricedRow) -> float | None:
    """The time of the model's FLOPs at the peak FLOP/s of the data sheet, for the dtype of the matrix products."""
    if each.evaluation is None or each.cluster is None or each.candidate is None:
        return None
    dtype = "float8" if each.row.precision in FLOAT8 else each.candidate.precision.compute
    peak = each.cluster.device.matrix_peak_flops_per_second(dtype)
    return each.evaluation.model_flops / (each.cluster.size * peak)
