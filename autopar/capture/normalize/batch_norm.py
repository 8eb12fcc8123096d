"""Batch norm as sums over the batch: exact global statistics for a sharded batch (as SyncBatchNorm), and gradients through them
by autograd. These functions take the place of torch's operations when an exported program is taken
apart (`tracing.decomposition`).

``local``: the statistics are those of the examples of one data rank in one forward, as in DDP. Then ``ap.local_mean`` gives each
example the mean over its rank's examples; the running statistics take the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

LOCAL = "batch norm takes its statistics from each data rank's own examples (batch_norm=local)"
LOCAL_MEAN = "ap.local_mean"

Normalized = tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]
"""The input without its mean, divided by its deviation; and what makes the mean and the variance without bias, for the running
statistics: after the result, where graphs of saved plans have them."""


def batch_norms(local: bool) -> Mapping[Any, Callable[..., Any]]:
    """Return the operations of torch that batch norms become, each with the function that takes its place."""
    aten, training = torch.ops.aten, partial(_training, _of_own_rank if local else _of_all_ranks)

    def with_running(
        x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, train: bool, momentum: float, epsilon: float
    ) -> tuple[Any, ...]:
        if train:
            return training(x, weight, bias, mean, variance, momentum, epsilon)
        return *_inference(x, weight, bias, mean, variance, momentum, epsilon), mean, variance

    def without_running(x: Tensor, weight: Any, bias: Any, train: bool, momentum: float, epsilon: float) -> tuple[Any, ...]:
        return training(x, weight, bias, None, None, momentum, epsilon)[:3]

    return {
        aten._native_batch_norm_legit_functional.default: with_running,
        aten._native_batch_norm_legit.no_stats: without_running,
        aten._native_batch_norm_legit_no_training.default: _inference,
    }


def _training(
    statistics: Callable[[Tensor, list[int], float], Normalized], x: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor | None, running_variance: Tensor | None, momentum: float, epsilon: float,
) -> tuple[Any, ...]:  # fmt: skip
    dims = [dim for dim in range(x.dim()) if dim != 1]
    normal, fresh = statistics(_widened(x, weight, bias), dims, epsilon)
    result = _affine(normal, weight, bias, x)
    mean, variance = fresh()
    return result, mean, variance, _moved(running_mean, mean, momentum), _moved(running_variance, variance, momentum)


def _of_all_ranks(x: Tensor, dims: list[int], epsilon: float) -> Normalized:
    number = prod(x.shape[dim] for dim in dims)
    mean = x.sum(dims, keepdim=True) / number
    centered = x - mean
    squares = (centered * centered).sum(dims, keepdim=True)
    return centered * (squares / number + epsilon).rsqrt(), lambda: (mean, squares / (number - 1))


def _of_own_rank(x: Tensor, dims: list[int], epsilon: float) -> Normalized:
    mean = _local_mean()(x, dims, 0)
    centered = x - mean
    squares = centered * centered

    def fresh() -> tuple[Tensor, Tensor]:
        unbiased = _local_mean()(squares.detach(), dims, 1)
        return _over_examples(mean), _over_examples(unbiased)

    return centered * (_local_mean()(squares, dims, 0) + epsilon).rsqrt(), fresh


def _over_examples(x: Tensor) -> Tensor:
    """The mean over all examples of what each has of its rank."""
    return x.detach().sum(0, keepdim=True) / x.shape[0]


def _inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, momentum: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _widened(x, weight, bias, mean, variance)
    center, inverse = _per_channel(mean, x), (_per_channel(variance, x) + epsilon).rsqrt()
    return _affine((wide - center) * inverse, weight, bias, x), mean, variance


def _widened(x: Tensor, *beside: Tensor | None) -> Tensor:
    """The input in the widest dtype, as torch's kernels compute: under ``torch.autocast`` weights and statistics are wider."""
    return x.to(max((each.dtype for each in (x, *beside) if each is not None), key=lambda dtype: dtype.itemsize))


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape([size if dim == 1 else 1 for dim, size in enumerate(like.shape)])


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
    normal = normal if weight is None else normal * _per_channel(weight, like)
    return (normal if bias is None else normal + _per_channel(bias, like)).to(like.dtype)


def _moved(running: Tensor | None, fresh: Tensor, momentum: float) -> Tensor | None:
    """The new value of a running statistic, through which no gradient flows."""
    if running is None:
        return None
    fresh = fresh.reshape(running.shape).detach()
    return running * (1.0 - momentum) + fresh * momentum


@lru_cache(maxsize=1)
def _local_mean() -> Any:
    from autopar.runtime.ops.functions import local_mean as run

    @torch.library.custom_op("ap::local_mean", mutates_args=())
    def local_mean(x: Tensor, dims: Sequence[int], correction: int) -> Tensor:
        return run(x, dims, correction).clone()

    @local_mean.register_fake
    def _(x: Tensor, dims: Sequence[int], correction: int) -> Tensor:
        return x.new_empty([1 if dim in dims and dim else size for dim, size in enumerate(x.shape)])

    return local_mean
