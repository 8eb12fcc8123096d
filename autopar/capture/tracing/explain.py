"""One line for an error while tracing: the user's file and line, the module, and what to do."""

from __future__ import annotations

import re
from types import TracebackType

from torch import nn

from autopar.errors import CaptureError, OperatorError


def is_data_dependent(error: Exception) -> bool:
    """Whether a branch or a size depends on data."""
    text = f"{type(error).__name__} {error}"
    words = ("DataDependent", "data-dependent", "meta tensors", "on a meta tensor")
    return any(word in text for word in words)


def data_dependent(where: str) -> str:
    """The message for control flow or sizes that depend on data."""
    inside = "" if "(module " in where else " (it is the model's own forward: move it into a submodule)"
    return (
        f"{where}: control flow or a size depends on the data of a tensor; "
        "use torch.where, torch.cond or masks instead of if, .item() or boolean indexing (routed experts: call "
        f"autopar.ops.moe_experts), or leave the smallest submodule around it whole: autopar.opaque(module){inside}"
    )


def frame_names(traceback: TracebackType) -> tuple[str, ...]:
    """The name of the first argument of the frame's function (``self`` of a method)."""
    return traceback.tb_frame.f_code.co_varnames[:1]


def explain(error: Exception, model: nn.Module) -> CaptureError:
    """The CaptureError for an error while tracing: one line, with the user's file and line."""
    where, paths = "", {id(module): path for path, module in model.named_modules() if path}
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/autopar/capture/", "/autopar/ops/", "<", "contextlib")):
            where = f"{file}:{traceback.tb_lineno}"
            inside = next((paths.get(id(traceback.tb_frame.f_locals.get(name))) for name in frame_names(traceback)), None)
            where += f" (module {inside})" if inside else ""
        traceback = traceback.tb_next
    if match := re.search(r'File "([^"]+)", line (\d+)', str(error)):
        where = where or f"{match[1]}:{match[2]}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, OperatorError):
        return CaptureError(f"{where or type(model).__name__}: {error}")
    if is_data_dependent(error):
        return CaptureError(data_dependent(where or type(model).__name__))
    if "same device" in first:
        return CaptureError(
            f"{where or type(model).__name__}: a tensor made in forward is on another device than the inputs; "
            "pass device=x.device, or register it with register_buffer"
        )
    return CaptureError(f"{where or type(model).__name__}: the model cannot be captured: {type(error).__name__}: {first[:200]}")
