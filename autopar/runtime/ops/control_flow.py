"""Branches and loops that data decides: every rank has the same predicate, so all take the same branch; and modules that are left
whole: a program calls them by their path in the model, with their tensors.

A region is ``(names of its arguments, statements, names of its results)``; a statement is ``(names of its results, operation,
args, kwargs)``, with ``%name`` for a value. Autograd runs through it.

`MeshHandle.opaque_modules` has the code of modules (on the meta device, without values); whoever builds a program from a model
sets it. A process that never built the model, such as one that runs an exported folder, has no code to call.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.autograd import apply, has_data
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem

Region = tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]


def cond(predicate: Tensor, operands: Sequence[Tensor], true: Region, false: Region, results: Sequence[int] | None = None) -> Any:
    """The results of one branch (those of number `results`): a tensor, or several. Gradients of what the branch did not read are
    zeros. Without data (a dry run) the first branch."""
    values = run(true if _decides(predicate, True) else false, operands)
    return _wanted(reach_all(values, operands), results)


def while_loop(
    carried: Sequence[Tensor], further: Sequence[Tensor], condition: Region, body: Region, results: Sequence[int] | None = None
) -> Any:
    """Return `carried` (those of number `results`) after the last pass: a tensor, or several. Without data one pass."""
    values = list(carried)
    passes = 0
    while _decides(run(condition, (*values, *further))[0], passes == 0):
        values = run(body, (*values, *further))
        passes += 1
    return _wanted(reach_all(values, (*carried, *further)), results)


def _decides(predicate: Tensor, otherwise: bool) -> bool:
    return bool(predicate) if has_data(predicate) else otherwise


def _wanted(values: list[Tensor], results: Sequence[int] | None) -> Any:
    wanted = values if results is None else [values[number] for number in results]
    return wanted[0] if len(wanted) == 1 else wanted


def run(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
    """The results of a region."""
    names, statements, results = region
    values: dict[str, Tensor] = dict(zip(names, operands, strict=True))
    device = operands[0].device if operands else torch.device("cpu")
    for targets, op, args, kwargs in statements:
        if op in ("ap.cond", "ap.while_loop"):
            first, second = (_filled(arg, values) for arg in args[:2])
            result = (cond if op == "ap.cond" else while_loop)(first, second, *args[2:])
        else:
            call, makes = _operation(op)
            options = {key: _filled(arg, values) for key, arg in kwargs}
            if makes:
                options["device"] = device
            result = call(*_filled(args, values), **options)
        several = result if isinstance(result, (tuple, list)) else (result,)
        values.update(zip(targets, several, strict=True))
    return [values[name] for name in results]


def _filled(arg: Any, values: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, str) and arg.startswith("%"):
        return values[arg[1:]]
    return tuple(_filled(item, values) for item in arg) if isinstance(arg, tuple) else arg


@lru_cache(maxsize=1024)
def _operation(op: str) -> tuple[Any, bool]:
    """The operation of ATen, and whether it makes a tensor of nothing but numbers (on a device). RuntimeProblem for others."""
    words = op.split(".")
    if words[0] != "aten" or len(words) not in (2, 3):
        raise RuntimeProblem(f"{op} cannot run inside of torch.cond or while_loop: move it outside of the branch")
    operation: Any = getattr(getattr(torch.ops.aten, words[1]), words[2] if len(words) == 3 else "default")
    arguments = operation._schema.arguments
    makes = any(each.name == "device" for each in arguments) and not any("Tensor" in str(each.type) for each in arguments)
    return operation, makes


def without_data(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def opaque(tensors: Sequence[Tensor], path: str, names: str, training: bool, batchwise: bool, mesh: MeshHandle) -> Any:
    """Return the result of the module at `path` of the model, see `call_whole`. RuntimeProblem where this process never built the
    model."""
    module = mesh.opaque_modules.get(path)
    if module is None:
        raise RuntimeProblem(
            f"the program calls the module {path}, which autopar.opaque left whole, and this process never built the model: "
            "make the program with autopar.parallelize(model, ...) (an exported folder cannot hold its code)"
        )
    return call_whole(module, tensors, names, training, batchwise)


def call_whole(module: nn.Module, tensors: Sequence[Tensor], names: str, training: bool, batchwise: bool = False) -> Any:
    """Return the result of a module: a tensor or several. `tensors` are its arguments, of which `names` has one word each (``*``:
    by position), then its parameters and buffers. Autograd runs through it."""
    words = names.split()
    arguments = list(zip(words, tensors, strict=False))
    paths = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    state = dict(zip(paths, tensors[len(words) :], strict=True))
    if module.training != training:
        module.train(training)
    positional = tuple(tensor for word, tensor in arguments if word == "*")
    keywords = {word: tensor for word, tensor in arguments if word != "*"}
    out = torch.func.functional_call(module, state, positional, keywords)
    results = [out] if isinstance(out, Tensor) else list(out)
    if batchwise:  # ranks take branches of their own, and all must have all gradients to reduce
        results = reach_all(results, tensors)
    return results[0] if isinstance(out, Tensor) else results


def reach_all(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Results whose backward reaches all of `tensors`, with zeros where no path leads to one."""
    taking = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
    return [apply(_ReachAll, each, *taking) if taking and each.is_floating_point() else each for each in results]


class _ReachAll(torch.autograd.Function):
    """The result, with zeros as the gradients of tensors that a branch did not read."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
