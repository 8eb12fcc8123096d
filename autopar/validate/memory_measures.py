"""The memory of a published run in the way that it was measured: by the allocator model of the planner
(`cost_models.hardware.allocator`), without factors of its own. Only the communicators of other software differ."""

from __future__ import annotations

from autopar.cost_models.hardware.allocator import COMMUNICATOR_BYTES, DeviceMemory
from autopar.cost_models.step.evaluate import Evaluation
from autopar.cost_models.step.stage_memory import StageMemory
from autopar.validate.rows import Row
from autopar.validate.summary import measure_of

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
