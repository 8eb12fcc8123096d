"""The file that `parallel.report().save` writes, read and checked: whatever is wrong with it is an error of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from autopar.errors import FileError, PlanMismatch
from autopar.files import read_bytes
from autopar.ir.plan_file.plan_file import Plan
from autopar.runtime.device.mesh import PIPELINE_AXIS
from autopar.runtime.report.step_report import FORMAT, VERSION

_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_Text = Annotated[str, msgspec.Meta(max_length=300)]
_MOST = 100_000
_MOST_BYTES = 64 * 2**20


class _Stage(msgspec.Struct, forbid_unknown_fields=True):
    stage: _Whole
    ranks: _Whole
    seconds: _Number
    compute_seconds: _Number
    most_compute_seconds: _Number
    blocks_seconds: _Number
    least_processor_seconds: _Number
    processor_seconds: _Number
    model_wait_seconds: _Number
    data_wait_seconds: _Number
    pipeline_wait_seconds: _Number
    optimizer_seconds: _Number


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    stage: _Whole
    block: _Text
    first: _Text
    modules: _Whole
    calls: _Whole
    forward_seconds: _Number
    backward_seconds: _Number


class _Collective(msgspec.Struct, forbid_unknown_fields=True):
    stage: _Whole
    kind: _Text
    axis: _Text
    times: _Number
    bytes: _Number
    seconds: _Number
    wait_seconds: _Number
    most_wait_seconds: _Number


class _Memory(msgspec.Struct, forbid_unknown_fields=True):
    stage: _Whole
    peak_bytes: _Whole
    parameters: _Whole
    optimizer: _Whole
    inputs: _Whole
    gradients: _Whole
    rest: int


class _MeasuredFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    ranks: _Whole
    mesh: dict[_Text, _Whole]
    device: _Text
    steps: _Whole
    micro_batches: _Whole
    step_seconds: _Positive
    least_step_seconds: _Number
    between_seconds: _Number
    examples: _Number
    stages: Annotated[list[_Stage], msgspec.Meta(min_length=1, max_length=_MOST)]
    blocks: Annotated[list[_Block], msgspec.Meta(max_length=_MOST)]
    collectives: Annotated[list[_Collective], msgspec.Meta(max_length=_MOST)]
    memory: Annotated[list[_Memory], msgspec.Meta(max_length=_MOST)]
    compiled: bool | None = None


def read_measured(path: str | Path, plan: Plan) -> dict[str, Any]:
    """Read the measured step. FileError where it is none, PlanMismatch where another plan was measured."""
    content = read_bytes(path, FileError, "the measured step", _MOST_BYTES)
    remedy = "name a file that parallel.report().save(...) wrote"
    try:
        file = msgspec.json.decode(content, type=_MeasuredFile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        raise FileError(f"{path} is not a measured step ({fault}): {remedy}") from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise FileError(f"{path} is not a measured step of version {VERSION}: {remedy} of this autopar")
    candidate = plan.candidate
    stages = candidate.pipeline.stages
    axes = ({PIPELINE_AXIS: stages} if stages > 1 else {}) | {axis.name: axis.size for axis in candidate.mesh.axes}
    same = {name: size for name, size in file.mesh.items() if size > 1} == {n: size for n, size in axes.items() if size > 1}
    if not same or file.micro_batches != candidate.micro_batches or len(file.stages) != stages:
        measured = " x ".join(f"{name}={size}" for name, size in file.mesh.items())
        raise PlanMismatch(
            f"{path} measured {measured} with {file.micro_batches} micro-batches, the plan is {candidate.mesh} on {stages} "
            f"pipeline stages with {candidate.micro_batches}: name the plan that ran (parallel.plan.save(...))"
        )
    result: dict[str, Any] = msgspec.to_builtins(file)
    return result
