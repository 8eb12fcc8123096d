"""All rows priced, and what they add up to: the one document behind ``autopar validate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.validate.configuration import FLOAT8
from autopar.validate.measures import predicted_bytes
from autopar.validate.price import Priced
from autopar.validate.summary import Point, Times, memory, null_model, times


@dataclass(frozen=True, slots=True)
class Report:
    """`null_utilisation` is the constant share of peak FLOP/s of the null model."""

    priced: tuple[Priced, ...]
    points: tuple[Point, ...]
    times: Times
    memory: dict[str, Any]
    null_times: Times
    null_utilisation: float

    def document(self) -> dict[str, Any]:
        """The JSON document: every row of the table, and the summary."""
        skipped = sum(bool(each.skipped) for each in self.priced)
        summary = {"expressed": len(self.priced) - skipped, "skipped": skipped, **asdict(self.times), "memory": self.memory}
        summary["null_model"] = {"utilisation": self.null_utilisation, **asdict(self.null_times)}
        return {"rows": [_row(each, point) for each, point in zip(self.priced, self.points, strict=True)], "summary": summary}


def _row(each: Priced, point: Point) -> dict[str, Any]:
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


def report(priced: Sequence[Priced]) -> Report:
    """Sums up what `price_rows` returned."""
    points = tuple(map(_point, priced))
    capacities = {each.row.id: float(each.evaluation.memory_capacity_bytes) for each in priced if each.evaluation}
    ideal = {each.row.id: seconds for each in priced if (seconds := _ideal_seconds(each))}
    share, guessed = null_model(points, ideal)
    found = memory(points, lambda point: capacities[point.row.id])
    return Report(tuple(priced), points, times(points), found, guessed, share)


def _point(each: Priced) -> Point:
    if each.evaluation is None:
        return Point(each.row, None, None, each.skipped)
    return Point(each.row, each.evaluation.step_seconds, predicted_bytes(each.row, each.evaluation))


def _ideal_seconds(each: Priced) -> float | None:
    """Model FLOPs at the data sheet's peak of the products' dtype."""
    if each.evaluation is None or each.cluster is None or each.candidate is None:
        return None
    dtype = "float8" if each.row.precision in FLOAT8 else each.candidate.precision.compute
    peak = each.cluster.device.peak_flops_per_second(dtype)
    return each.evaluation.model_flops / (each.cluster.size * peak)
