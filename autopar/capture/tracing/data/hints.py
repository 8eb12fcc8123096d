"""Questions that torch's own modules ask of data, to be faster or to have a number: while a model is traced, they need not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.runtime.compat.hooks import replaced


def masks_are_not_read() -> AbstractContextManager[None]:
    """``nn.TransformerEncoder`` compares its mask with a causal one, to say so to the kernel beside the mask. It is said where
    the caller does; the mask counts in any case, and `normalize.masks` finds causal ones."""

    def hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return replaced(transformer, "_detect_is_causal_mask", hint)


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


def cumulative_statistics() -> AbstractContextManager[None]:
    """Batch norm with ``momentum=None`` makes a number of how many batches it saw, for the mean over all of them. Here that
    stays a tensor."""
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

    return replaced(_BatchNorm, "forward", forward)
