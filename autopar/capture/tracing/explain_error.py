"""One line for an error while tracing: the user's file and line, the module, and what to do."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from traceback import walk_tb

from torch import nn

from autopar.capture.tracing.places import is_users
from autopar.errors import CaptureError, OperatorError

NAMED_LINE = re.compile(r'File "((?!\S*/autopar/capture/)(?!\S*/torch/)[^"]+)", line (\d+)')
"""A line that is no frame of torch's or capture's, in what torch says of an error."""
INTERNAL = r"torch\._|[Ff]ake|[Pp]roxy|[Dd]ynamo|functorch|Wrapper|[Uu]nbacked|trac|meta|dispatch|SymInt|\bu\d|constant"
"""Words of a message of torch that speaks of itself."""
WHOLE = "; or leave the smallest submodule around it whole: autopar.opaque(module)"
CONSTRUCTS = (
    (r"ctc_loss", "ctc_loss of targets in one line, one after the other: pass targets as (batch, length), padded"),
    (r"jacrev|jacfwd|hessian|\bvjp\b|\bjvp\b|func\.grad", 
     "derivatives inside of the forward cannot be captured here: write them as operations, or take them outside of the model"),
    (r"\.numpy\(|\bnp\.|numpy", "numpy reads the data of a tensor: call the function of torch"),
    (r"nested", "nested tensors cannot be sharded: pad them, and pass a mask"),
    (r"[Ss]parse", "sparse tensors cannot be sharded: use index_add or scatter_add on dense ones"),
    (r"[Gg]enerator", "a generator of its own would draw the same numbers on every rank: draw without generator="),
    (r"jit\.|ScriptModule|ScriptFunction", "functions of torch.jit cannot be captured: call the Python function itself"),
)  # fmt: skip
"""Words in the line of an error, or in torch's message, that tell the construct that is refused, and what to do about it."""


def explain(error: Exception, model: nn.Module, derivatives: Sequence[str] = ()) -> CaptureError:
    """The CaptureError for an error while tracing: one line, with the user's file and line. `derivatives`: the lines that take
    derivatives in the forward."""
    where, code, last = place(error, model)
    first = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, OperatorError):
        return CaptureError(f"{where}: {error}")
    if derivatives:
        return derivative_refused(derivatives)
    if is_data_dependent(error):
        return CaptureError(data_dependent(where))
    if mutated := re.match(r"Constant (?:module\.)?(\S+) is mutated", first):
        name = "a tensor outside of the model" if mutated[1].startswith("lifted_tensor") else mutated[1]
        return CaptureError(
            f"{where}: the forward writes into {name}, which is no buffer, so that a program does not keep it: make it one "
            "(register_buffer, in a module of the model), or pass it in with the batch and return it"
        )
    if "same device" in first:
        return CaptureError(
            f"{where}: a tensor made in forward is on another device than the inputs; "
            "pass device=x.device, or register it with register_buffer"
        )
    construct = next((words for pattern, words in CONSTRUCTS if re.search(pattern, f"{code} {first}")), "")
    if construct:
        return CaptureError(f"{where}: {construct}{WHOLE}")
    if last:
        said = f"{type(error).__name__}: {first[:200]}"
        asks = "while captured; otherwise not, if it asks torch.compiler.is_compiling()"
        return CaptureError(f"{where}: the forward raises {said} ({asks}): mend the model or its inputs")
    what = f"`{code[:80]}`" if code else "an operation of the model"
    if (type(error) is RuntimeError and not re.search(INTERNAL, first)) or "must be Tensor, not" in first:
        return CaptureError(f"{where}: {what} fails: {first[:200]}; mend the model or its example inputs")
    return CaptureError(f"{where}: {what} cannot be captured: write it with other operations of torch{WHOLE}")


def derivative_refused(lines: Sequence[str]) -> CaptureError:
    """The line for a derivative in a forward that export cannot follow."""
    return CaptureError(
        f"{lines[0]}: torch.autograd.grad inside of the forward cannot be captured here: write the derivative as operations, or "
        f"take it outside of the model{WHOLE}"
    )


def place(error: Exception, model: nn.Module) -> tuple[str, str, bool]:
    """Return the place where an error comes from: the user's innermost line with the innermost module that calls it, the text of
    the line, and whether the line itself raises."""
    paths = {id(module): path.removeprefix("module.") for path, module in model.named_modules() if path not in ("", "module")}
    where, code, inside, last = "", "", "", False
    for frame, line in walk_tb(error.__traceback__):
        file, first = frame.f_code.co_filename, next(iter(frame.f_code.co_varnames), "")
        inside = paths.get(id(frame.f_locals.get(first)), inside)
        last = is_users(file)
        if last:
            where, code = f"{file}:{line}", linecache.getline(file, line).strip()
    if match := None if where else NAMED_LINE.search(str(error)):
        where, code = f"{match[1]}:{match[2]}", linecache.getline(match[1], int(match[2])).strip()
    where = where or type(getattr(model, "module", model)).__name__
    return f"{where} (module {inside})" if inside else where, code, last


def is_data_dependent(error: Exception) -> bool:
    """Return whether a branch or a size depends on data."""
    text = f"{type(error).__name__} {error}"
    words = ("DataDependent", "data-dependent", "meta tensors", "on a meta tensor", "DynamicOutputShape")
    return any(word in text for word in words)


def data_dependent(where: str) -> str:
    """The message for control flow or sizes that depend on data."""
    inside = "" if "(module " in where else " (it is the model's own forward: move it into a submodule)"
    return (
        f"{where}: control flow or a size depends on the data of a tensor; "
        "use torch.where, torch.cond or masks instead of if, .item() or boolean indexing, torch.index_select where a tensor of "
        "one number is an index, x[i] (losses of some positions: ignore_index, or those of all times the mask; routed experts: "
        "autopar.ops.moe_experts), or leave the smallest submodule "
        f"around it whole: autopar.opaque(module){inside}"
    )
