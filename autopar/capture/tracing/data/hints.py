"""Questions that torch's own modules ask of data, to be faster or to have a number: while a model is traced, they need not. And
lists of numbers as indices, whose values they would lose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode

from autopar.runtime.compat.hooks import replaced


def masks_are_not_read() -> AbstractContextManager[None]:
    """``nn.TransformerEncoder`` compares its mask with a causal one, to say so to the kernel beside the mask. It is said where
    the caller does; the mask counts in any case, and `normalize.masks` finds causal ones."""

    def hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return replaced(transformer, "_detect_is_causal_mask", hint)


PADDED_ENCODER = (
    "an nn.TransformerEncoder has a padding mask: in evaluation without gradients the program computes what torch does under "
    "torch.backends.mha.set_fastpath_enabled(False)"
)


@contextmanager
def padded_encoders() -> Iterator[list[str]]:
    """Yield `PADDED_ENCODER` for each call of an ``nn.TransformerEncoder`` for which torch may take its fast path in evaluation:
    over nested tensors, whose padded outputs are zeros. While a model is traced it does not, since that depends on the mask."""
    before, notes = nn.TransformerEncoder.forward, list[str]()

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if self.use_nested_tensor and src.dim() == 3 and src_key_padding_mask is not None and mask is None:
            notes.append(PADDED_ENCODER)
        return before(self, src, mask, src_key_padding_mask, is_causal)

    with replaced(nn.TransformerEncoder, "forward", forward):
        yield notes


def to_the_same_device() -> AbstractContextManager[None]:
    """``submodule.to(device)`` in a forward, where it is there already: torch would swap parameters that are being traced."""
    before = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        if dtype is None and device is not None and all(tensor.device == device for tensor in tensors):
            return self
        return before(self, *args, **kwargs)

    return replaced(nn.Module, "to", to)


@contextmanager
def plain_batch_norms() -> Iterator[None]:
    """Batch norm with ``momentum=None`` makes a number of how many batches it saw, for the mean over all of them. Here that
    stays a tensor. And `nn.SyncBatchNorm`, which has collectives of its own, is one like others: its batch is the global one."""
    before = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        x = input
        seen, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
        if self.momentum is not None or not self.training or seen is None or mean is None or variance is None:
            return before(self, x)
        self._check_input_dim(x)
        with torch.no_grad():
            seen.add_(1)
            dims = [dim for dim in range(x.dim()) if dim != 1]
            share = 1 / seen.to(mean.dtype)
            for running, found in ((mean, x.mean(dims)), (variance, x.var(dims))):
                running.copy_(running + share * (found - running))
        return batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    with replaced(_BatchNorm, "forward", forward), replaced(SyncBatchNorm, "forward", forward):
        yield


class ListIndices(TorchFunctionMode):
    """Lists of numbers as indices (``x[:, [-1]]``) have values: torch makes tensors of them where the indexed one is, on meta.
    One number is a slice of length 1, several are a tensor. And old masks of ``torch.where`` are those of today."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
