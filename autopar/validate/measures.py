"""What the ways of measuring memory add to the tensors that the model counts: one slack and one base per measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.evaluate import Evaluation
from autopar.cost_models.hardware import GIB
from autopar.validate.rows import Row
from autopar.validate.summary import measure_of


@dataclass(frozen=True, slots=True)
class Measure:
    """``measured = slack x tensors + base_bytes``."""

    slack: float
    base_bytes: float
    source: str


def measures() -> Mapping[str, Measure]:
    """Declared once for all rows, devices and stacks."""
    return {
        "allocated": Measure(1.0, 0.0, "tensors are what the caching allocator calls allocated"),
        "reserved": Measure(1.2, 0.0, "segments of the caching allocator that are not full; fitted on 64 rows"),
        "nvidia_smi": Measure(1.2, 6.0 * GIB, "as reserved, and CUDA context, cuBLAS, NCCL channels, buckets; fitted on 59 rows"),
        "unstated": Measure(1.0, 0.0, "as allocated"),
    }


def predicted_bytes(row: Row, evaluation: Evaluation, measure: str = "") -> float:
    """What the row's way of measuring would show. Tensors are those of the ranks that were looked at."""
    chosen = measures()[measure or measure_of(row)]
    return chosen.slack * _tensors(row, evaluation) + chosen.base_bytes


def _tensors(row: Row, evaluation: Evaluation) -> float:
    stages = [stage.tensor_bytes for stage in evaluation.stage_memory]
    if "last rank" in row.memory_measure:
        return stages[-1]
    if "first/last" in row.memory_measure:
        return max(stages[0], stages[-1])
    return max(stages)
