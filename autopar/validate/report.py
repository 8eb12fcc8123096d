"""The report of a validation: all rows with predicted and measured cost, and the summary that ``autopar validate`` prints. The
memory of a run is predicted in the way that it was measured: by the allocator model of the planner
(`cost_models.hardware.allocator`), without factors of its own. Only the communicators of other software differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autopar.cost_models.hardware.allocator import COMMUNICATOR_BYTES, DeviceMemory
from autopar.cost_models.step.evaluate import Evaluation
from autopar.cost_models.step.stage_memory import StageMemory
from autopar.validate.configuration import FLOAT8
from autopar.validate.price import PricedRow
from autopar.validate.rows import Row
from autopar.validate.summary import Comparison, TimeErrors, measure_of, memory_errors, null_model, time_errors


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


MORE_COMMUNICATORS = {"megatron-deepspeed": 8}
"""The communicators, by software, beside one for each axis and that of all ranks. Megatron-DeepSpeed has those of Megatron's
parallel_state (data, tensor, pipeline; also tensor and pipeline together, and the embeddings of the first and last stage) and
again those of DeepSpeed's PipelineParallelGrid (data, pipeline, slice, model) with one for tied weights, which its engine uses in
their place; megatron/mpu/initialize.py, deepspeed/runtime/pipe/topology.py."""


def measured_stage(row: Row, evaluation: Evaluation) -> StageMemory:
    """The fullest stage of those that were measured."""
    stages = evaluation.stage_memory
    if "last rank" in row.memory_measure:
        return stages[-1]
    if "first/last" in row.memory_measure:
        return max(stages[0], stages[-1], key=lambda each: each.tensor_bytes)
    return max(stages, key=lambda each: each.tensor_bytes)


def run_memory(row: Row, stage: StageMemory) -> DeviceMemory:
    """The memory of one stage of a run, under its software."""
    more = MORE_COMMUNICATORS.get(row.software_stack, 0) * COMMUNICATOR_BYTES
    return DeviceMemory(stage.tensor_bytes, stage.reserved_bytes, stage.peak_bytes + more)


def predicted_bytes(row: Row, evaluation: Evaluation, measure: str = "") -> float:
    """The memory that the row's way of measuring would show, on the ranks that were measured; allocated where the source does not
    say what it measured."""
    found = run_memory(row, measured_stage(row, evaluation))
    sizes = {"nvidia_smi": found.shown, "reserved": found.reserved}
    return sizes.get(measure or measure_of(row), found.allocated)


def least_bytes(row: Row, evaluation: Evaluation) -> float:
    """Return the bytes that the run cannot do without, on its fullest stage: with less it is sure to run out of memory."""
    return max(run_memory(row, stage).least for stage in evaluation.stage_memory)
