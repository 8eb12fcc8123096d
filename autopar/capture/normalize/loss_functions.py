"""Losses as gathers and sums: ``nll_loss``, cross entropy with class weights, class probabilities or a loss of each element (all
others may shard the vocabulary, see `losses`), and squared errors. These functions take the place of torch's operations when an
exported program is taken
apart (`tracing.decomposition`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_NONE, _MEAN, _SUM = 0, 1, 2


def loss_functions() -> Mapping[Any, Callable[..., Any]]:
    """Return the operations of torch, each with the function that takes its place."""
    aten = torch.ops.aten

    def with_mass(*args: Any) -> tuple[Tensor, Tensor]:
        loss = nll_loss(*args)
        return loss, loss  # nobody reads the sum of the weights

    return {
        aten.cross_entropy_loss.default: cross_entropy_loss,
        aten.mse_loss.default: mse_loss,
        **dict.fromkeys((aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default), nll_loss),
        **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), with_mass),
    }


def cross_entropy_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """``F.cross_entropy``; NotImplemented, which leaves it as it is, where ``ap.cross_entropy_sum`` computes it."""
    indices = not target.is_floating_point()
    if indices and weight is None and reduction in (_MEAN, _SUM):
        return NotImplemented
    dim = _class_dim(logits)
    if indices:
        return nll_loss(logits.log_softmax(dim), target, weight, reduction, ignore_index, label_smoothing)
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / logits.shape[dim]
    return _reduced(-_over_classes(logits.log_softmax(dim) * target, weight, dim), reduction, None)


def nll_loss(
    logs: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """``F.nll_loss``, with the smoothing of ``F.cross_entropy``."""
    dim = _class_dim(logs)
    valid = target != ignore_index
    index = torch.where(valid, target, torch.zeros_like(target))
    each = -logs.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    weights = None if weight is None else weight[index]
    each = each if weights is None else each * weights
    if smoothing:
        every = _over_classes(logs, weight, dim)
        each = each * (1.0 - smoothing) + every * (-smoothing / logs.shape[dim])
    mass = valid.to(logs.dtype)
    each = torch.where(valid, each, torch.zeros_like(each))
    return _reduced(each, reduction, mass if weights is None else mass * weights)


def mse_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """``F.mse_loss``, in the dtype of its operands, which torch's own decomposition widens."""
    return _reduced((x - target) ** 2, reduction, None)


def _class_dim(logits: Tensor) -> int:
    """The dimension of the classes: 1, or 0 of a single example."""
    return 1 if logits.dim() > 1 else 0


def _over_classes(logs: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    """The sum over classes, each with its weight."""
    if weight is not None:
        logs = logs * weight.reshape([size if at == dim else 1 for at, size in enumerate(logs.shape)])
    return logs.sum(dim)


def _reduced(each: Tensor, reduction: int, mass: Tensor | None) -> Tensor:
    """The reduction of a loss of each element; `mass` is what the mean divides by the sum of (None: the number of elements)."""
    if reduction == _NONE:
        return each
    total = each.sum()
    return total if reduction == _SUM else total / (each.numel() if mass is None else mass.sum())
