"""What a way of measuring memory (allocated, reserved, nvidia-smi) adds to the bytes of tensors that the cost model predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.hardware.cluster_file import GIB
from autopar.cost_models.step.evaluate import Evaluation
from autopar.validate.rows import Row
from autopar.validate.summary import measure_of


@dataclass(frozen=True, slots=True)
class MemoryMeasure:
    """``measured = slack x tensors + base_bytes``."""

    slack: float
    base_bytes: float
    source: str


def memory_measures() -> Mapping[str, MemoryMeasure]:
    """The constants of each way of measuring; the same for all rows, devices and stacks."""
    return {
        "allocated": MemoryMeasure(1.0, 0.0, "tensors are what the caching allocator calls allocated"),
        "reserved": MemoryMeasure(1.2, 0.0, "segments of the caching allocator that are not full; fitted on 64 rows"),
        "nvidia_smi": MemoryMeasure(
            1.2, 6.0 * GIB, "as reserved, and CUDA context, cuBLAS, NCCL channels, buckets; fitted on 59 rows"
        ),
        "unstated": MemoryMeasure(1.0, 0.0, "as allocated"),
    }


def predicted_bytes(row: Row, evaluation: Evaluation, measure: str = "") -> float:
    """The memory that the row's way of measuring would show, on the ranks that were measured."""
    chosen = memory_measures()[measure or measure_of(row)]
    return chosen.slack * _tensors(row, evaluation) + chosen.base_bytes


def _tensors(row: Row, evaluation: Evaluation) -> float:
    stages = [stage.tensor_bytes for stage in evaluation.stage_memory]
    if "last rank" in row.memory_measure:
        return stages[-1]
    if "first/last" in row.memory_measure:
        return max(stages[0], stages[-1])
    return max(stages)
