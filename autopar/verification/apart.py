"""The model for one run of its own: whatever the run changes in it is not seen afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def apart(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model. Where a copy would not stand for itself (a lambda that closes over a submodule reads the one of the
    model, a tensor that autograd made cannot be copied), the model itself, which is put back as it was."""
    if not _closes_over_itself(model):
        try:
            alone = copy.deepcopy(model)
        except RuntimeError:  # torch: only graph leaves support the deepcopy protocol (weight norm with hooks)
            pass
        else:
            yield alone
            return
    put_back = _snapshot(model)
    try:
        yield model
    finally:
        put_back()


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its floating-point tensors in `dtype`, and complex ones in that of as many bits for each part; bfloat16 and
    float16 have none. In place."""
    parts = dtype.to_complex() if dtype in (torch.float32, torch.float64) else None

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor if parts is None else tensor.to(parts)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(convert)
    return model


def moved_by_a_rounding(model: nn.Module, inputs: Mapping[str, Tensor], seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, in place, and its inputs with each floating-point number a rounding larger or smaller. What departs by more than
    roundings then (the norm of a single number, the sign of a vanishing one) no other order of sums can keep."""
    draw = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=draw).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(moved(tensor))
    return model, {name: moved(tensor) for name, tensor in inputs.items()}


def _closes_over_itself(model: nn.Module) -> bool:
    own = {id(module) for module in model.modules()} | {id(parameter) for parameter in model.parameters()}
    seen: set[int] = set()
    return any(_holds(value, own, seen, False) for module in model.modules() for value in vars(module).values())


def _holds(value: Any, own: set[int], seen: set[int], inside: bool) -> bool:
    """Return whether a function in `value` (`inside`: it is in one) closes over, or has as a default, what is in `own`."""
    if inside and id(value) in own:
        return True
    if id(value) in seen or isinstance(value, (nn.Module, Tensor, str, int, float)):
        return False
    seen.add(id(value))
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
        parts, inside = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()], True
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    else:
        return False
    return any(_holds(part, own, seen, inside) for part in parts)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Give what puts parameters, buffers, gradients and plain attributes back."""
    tensors = [(tensor, tensor.data, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    containers = [
        (value, copy.copy(value)) for _, kept in attributes for value in kept.values() if isinstance(value, (list, dict, set))
    ]
    for parameter, _ in gradients:
        parameter.grad = None

    def put_back() -> None:
        for now, kept in attributes:
            now.clear()
            now.update(kept)
        for container, held in containers:
            container.clear()
            container.extend(held) if isinstance(container, list) else container.update(held)
        for tensor, data, values in tensors:
            tensor.data = data
            with torch.no_grad():
                data.copy_(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    return put_back
