"""Modules that are left whole: a program calls them by key, with their tensors.

`register` notes the code of a module (on the meta device, without its values); every process that builds the model does so in the
same order, so keys agree. A process that never built the model, such as one that runs an exported folder, has no code to call.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import apply
from ..errors import RuntimeProblem

_skeletons: dict[str, nn.Module] = {}


def register(module: nn.Module) -> str:
    """The key of a module: its class, and how many of that class were registered before."""
    name = f"{type(module).__module__.rpartition('.')[2]}.{type(module).__qualname__}".replace("<locals>.", "")
    name = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in name)
    key = f"{name}.{sum(known.startswith(f'{name}.') for known in _skeletons)}"
    _skeletons[key] = without_data(module)
    return key


def without_data(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def skeleton(key: str) -> nn.Module:
    """The registered module. RuntimeProblem where this process never built it."""
    found = _skeletons.get(key)
    if found is None:
        raise RuntimeProblem(
            f"the program calls {key.rpartition('.')[0]}, which autopar.opaque left whole, and this process never built it: "
            "build the model before the program runs (an exported folder cannot hold it)"
        )
    return found


def opaque(tensors: Sequence[Tensor], key: str, names: str, training: bool, batchwise: bool = False) -> Any:
    """What the module gives: a tensor or several. `tensors` are its arguments, of which `names` has one word each (``*``: by
    position), then its parameters and buffers. Autograd runs through it."""
    module = skeleton(key)
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
        taking = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        results = [apply(_ReachAll, each, *taking) if taking and each.is_floating_point() else each for each in results]
    return results[0] if isinstance(out, Tensor) else results


class _ReachAll(torch.autograd.Function):
    """The result, with zeros as the gradients of tensors that a branch did not read."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
