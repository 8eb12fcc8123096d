"""torch.export of a copy of the model without data: the model itself is never touched."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.utils._pytree import tree_leaves

from autopar.capture.chain import join_layers
from autopar.capture.guards import refuse_custom_functions, refuse_hooks
from autopar.capture.outline import outline
from autopar.errors import CaptureError

NO_GRAD_MARK = "autopar_no_grad"


@dataclass(frozen=True, slots=True)
class Traced:
    """An exported program of a module `LossOnly` around the model, with the names of its tensor inputs."""

    program: ExportedProgram
    input_names: tuple[str, ...]
    batch: int
    symbolic: bool
    ties: Mapping[str, str]
    """Every name of a tied parameter or buffer, to its first one."""


class LossOnly(nn.Module):
    """Calls the model with one dictionary and returns its scalar loss."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any], compute_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = model
        self.constants = dict(constants)
        self.compute_dtype = compute_dtype

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        dtype = self.compute_dtype
        if dtype is not None:  # as FSDP2's mixed precision does (cast_forward_inputs)
            batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return find_loss(self.module(**batch, **self.constants))


def find_loss(output: Any) -> Tensor:
    """The scalar: the output itself, its ``.loss``, its ``["loss"]``, or the first of a tuple. CaptureError otherwise."""
    candidate = output
    if isinstance(output, Mapping):
        candidate = output["loss"] if "loss" in output else first_scalar(output.values())
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        candidate = output.loss
    elif isinstance(output, (tuple, list)):
        candidate = first_scalar(output)
    if not isinstance(candidate, Tensor) or not is_scalar(candidate):
        raise CaptureError(
            f"the model returns {type(output).__name__} without a scalar loss; return the loss, or an object with .loss "
            "(Hugging Face models need labels in the example inputs)"
        )
    return candidate.reshape(()) if candidate.dim() else candidate


def is_scalar(tensor: Tensor) -> bool:
    """One element, whatever the batch."""
    return all(isinstance(size, int) and size == 1 for size in tensor.shape)


def first_scalar(items: Iterable[Any]) -> Tensor | None:
    """The first tensor of one element."""
    return next((item for item in items if isinstance(item, Tensor) and is_scalar(item)), None)


def copy_without_data(model: nn.Module, compute_dtype: torch.dtype | None) -> nn.Module:
    """A deep copy on the meta device; floating parameters in `compute_dtype`. Ties stay ties."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = compute_dtype if compute_dtype is not None and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def bind_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and constants by the names of forward's parameters. CaptureError for what cannot be named."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}") from None
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError(f"{type(model).__name__}.forward takes *{name}; pass the example inputs by keyword")
        else:
            flat[name] = value
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
    if "use_cache" in signature.parameters:
        constants["use_cache"] = False  # Hugging Face: a cache for generation, which training never reads
    if not tensors:
        raise CaptureError("the example inputs hold no tensor; pass a dict of keyword arguments or a tuple")
    for name, constant in constants.items():
        if isinstance(constant, (list, tuple, dict)) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(constant)):
            raise CaptureError(f"input {name} nests tensors in a {type(constant).__name__}; pass tensors as keyword arguments")
    return tensors, constants


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    compute_dtype: str | None,
    allowed: tuple[str, ...],
    outlined: bool = True,
) -> Traced:
    """Exports with a symbolic batch; where the model specialises it, once more with the batch as it is.

    `outlined`: of equal layers one is traced (see `outline`); what fails so is traced in full.
    """
    refuse_hooks(model)
    tensors, constants = bind_inputs(model, args, kwargs)
    leading = Counter(tensor.shape[0] for tensor in tensors.values() if tensor.dim())
    batch = leading.most_common(1)[0][0] if leading else 1
    dtype = getattr(torch, compute_dtype) if compute_dtype else None
    attempts = ((True, True), (True, False), (False, False)) if outlined else ((True, False), (False, False))
    for symbolic, short in attempts:
        clone = LossOnly(copy_without_data(model, dtype), constants, dtype)
        try:
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(quiet_logs())
                stack.enter_context(refuse_custom_functions(allowed))
                if short and not stack.enter_context(outline(clone.module)):
                    continue
                program = export_copy(clone, tensors, batch, symbolic)
            return Traced(program, tuple(tensors), batch, symbolic, tied_names(model))
        except CaptureError:
            raise
        except Exception as error:
            if short or (symbolic and not is_data_dependent(error)):
                continue
            raise explain(error, model) from None
    raise AssertionError


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def export_copy(clone: LossOnly, tensors: Mapping[str, Tensor], batch: int, symbolic: bool) -> ExportedProgram:
    """A functional program of ATen operations. A batch of 1 is traced as 2, since torch specialises 0 and 1."""
    batched = {name: bool(tensor.dim()) and tensor.shape[0] == batch for name, tensor in tensors.items()}
    size = max(batch, 2) if symbolic else batch
    example = {
        name: torch.empty((size, *tensor.shape[1:]) if batched[name] else tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    shapes = ({name: {0: Dim.DYNAMIC} if batched[name] else None for name in example},) if symbolic else None
    program: ExportedProgram = export(clone, (example,), dynamic_shapes=shapes, strict=False)
    mark_no_grad(program)
    join_layers(program)
    program = program.run_decompositions({})
    return program


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Export logs and prints what it is about to raise; the CaptureError says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def mark_no_grad(program: ExportedProgram) -> None:
    """Decompositions inline ``no_grad`` regions; the mark on the region's call survives on what comes out of it.

    The mark is the stack trace of the region's first operation, since the inlined operations lose theirs.
    """
    for node in program.graph.nodes:
        if "set_grad_enabled" in str(node.target) and node.args and node.args[0] is False:
            body = getattr(program.graph_module, str(getattr(node.args[1], "target", "")), None)
            inner = (each.meta.get("stack_trace") for each in body.graph.nodes) if body is not None else ()
            mark = {NO_GRAD_MARK: next((trace for trace in inner if trace), " ")}
            node.meta["custom"] = {**(node.meta.get("custom") or {}), **mark}


def is_data_dependent(error: Exception) -> bool:
    """Whether tracing met a branch or a size that depends on data."""
    text = f"{type(error).__name__} {error}"
    words = ("DataDependent", "data-dependent", "meta tensors", "on a meta tensor")
    return any(word in text for word in words)


def data_dependent(where: str) -> str:
    """The one line for what a graph cannot hold."""
    return (
        f"{where}: control flow or a size depends on the data of a tensor; "
        "use torch.where or masks instead of if, .item() or boolean indexing"
    )


def explain(error: Exception, model: nn.Module) -> CaptureError:
    """One line with the user's file and line."""
    where = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/autopar/capture/" not in file and "<" not in file and "contextlib" not in file:
            where = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    if match := re.search(r'File "([^"]+)", line (\d+)', str(error)):
        where = where or f"{match[1]}:{match[2]}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if is_data_dependent(error):
        return CaptureError(data_dependent(where or type(model).__name__))
    if "same device" in first:
        return CaptureError(
            f"{where or type(model).__name__}: a tensor made in forward is on another device than the inputs; "
            "pass device=x.device, or register it with register_buffer"
        )
    return CaptureError(f"{where or type(model).__name__}: the model cannot be captured: {type(error).__name__}: {first[:200]}")
