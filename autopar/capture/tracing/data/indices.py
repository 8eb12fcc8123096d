"""Lists of numbers as indices (``x[:, [-1]]``): torch makes them tensors of the indexed tensor's device, which here is meta, so
that their values would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ListIndices(TorchFunctionMode):
    """While a model is traced: one number in a list is a slice of length 1, several are a tensor with values; old masks of
    ``torch.where`` are those of today."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _with_values(args[1]), *args[2:])
        elif func in (torch.where, torch.Tensor.where) and (mask := args[func is torch.Tensor.where]).dtype is torch.uint8:
            args = tuple(mask.bool() if arg is mask else arg for arg in args)  # the kernels take it, fake tensors do not
        return func(*args, **(kwargs or {}))


def _with_values(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_list, items)):
        return index
    alone = sum(isinstance(item, (list, torch.Tensor)) for item in items) == 1
    return tuple(_of_list(item, alone) if _is_list(item) else item for item in items)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)


def _of_list(numbers: list[int], alone: bool) -> slice | torch.Tensor:
    if alone and len(numbers) == 1:
        return slice(numbers[0], numbers[0] + 1 or None)
    return torch.tensor(numbers)
