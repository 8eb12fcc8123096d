"""Modules that are left whole: a program calls them by their path in the model, with their tensors.

`MeshHandle.opaque_modules` has their code (on the meta device, without values); whoever builds a program from a model sets it. A
process that never built the model, such as one that runs an exported folder, has no code to call.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.autograd import apply
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem


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
