"""Cross entropy of logits: whole, sharded by classes, and from the operands of the head in chunks of tokens.

Half-precision losses are computed and returned in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.autograd import apply, keeps_graph
from ..compat.collectives import all_reduce, coordinate_in, wait_tensor
from ..device.axis import AxisHandle
from .functions import full_precision

Place = tuple[str, int | Tensor, int]
"""The group of the axis that shards classes (empty: one rank has all), the first class of this rank, and the number of all."""
_WHOLE = AxisHandle("")
_NO_CLASS = -1
"""An index that no class has: nothing is ignored."""


def cross_entropy_sum(logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross entropies of ``logits[..., V]`` against ``target[...]``, a scalar."""
    return F.cross_entropy(
        full_precision(logits).reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def _softmax(
    shifted: Tensor, target: Tensor, ignore: int, smoothing: float, place: Place
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of each token, and the softmax in the storage of `shifted`, logits less a number for each token; with the
    index of each target among this rank's classes, whether it is here, and whether it is one at all."""
    group, first, classes = place
    valid = target != ignore
    index = target - first
    # alone, an index beyond the classes is torch's error
    here = valid & (index >= 0) & (index < shifted.shape[-1]) if group else valid
    index = index.masked_fill(~here, 0).unsqueeze(-1)
    at_target = shifted.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0)
    total = shifted.sum(-1) if smoothing else torch.zeros_like(at_target)
    exponentials = shifted.exp_()
    sums = torch.stack((exponentials.sum(-1), at_target, total))
    if group:
        sums = wait_tensor(all_reduce(sums, "sum", group))
    losses = sums[0].log() - (1 - smoothing) * sums[1] - smoothing / classes * sums[2]
    return losses.masked_fill(~valid, 0.0), exponentials.div_(sums[0].unsqueeze(-1)), index, here, valid


class _ShardedCrossEntropy(torch.autograd.Function):
    """Saves one tensor of the size of the local logits (their softmax), and the targets. Allocates no other of that size in the
    forward (it works in place), and one in the backward: with a large vocabulary this is where a step's memory peaks."""

    @staticmethod
    def forward(
        ctx: Any,
        group: str,
        first: int | Tensor,
        classes: int,
        ignore: int,
        smoothing: float,
        logits: Tensor,
        target: Tensor,
    ) -> Tensor:
        highest = wait_tensor(all_reduce(logits.detach().amax(-1), "max", group))
        place, shifted = (group, first, classes), logits - highest.unsqueeze(-1)
        loss, softmax, index, here, valid = _softmax(shifted, target, ignore, smoothing, place)
        ctx.save_for_backward(softmax, index, here, valid)
        ctx.smoothing, ctx.classes = smoothing, classes
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, index, here, valid = ctx.saved_tensors
        scale = (grad * valid).unsqueeze(-1)
        hit = scale * here.unsqueeze(-1) * (1 - ctx.smoothing)
        result = (softmax - ctx.smoothing / ctx.classes).mul_(scale) if ctx.smoothing else softmax * scale
        return None, None, None, None, None, result.scatter_add_(-1, index, -hit), None


def cross_entropy_sharded(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, axis: AxisHandle) -> Tensor:
    """Return `cross_entropy_sum` of ``logits[..., V / n]`` that are sharded by classes: equal on all ranks of the axis.

    The result is Invariant: its gradient is expected equal on all ranks, and each rank's logits get their exact gradient. Two
    all-reduces of one and three numbers a token (Megatron-LM, arXiv:1909.08053, section 3).
    """
    if axis.size == 1:
        return cross_entropy_sum(logits, target, ignore_index, label_smoothing)
    place = axis.group_name, *axis.span(logits.shape[-1], target)
    losses: Tensor = apply(_ShardedCrossEntropy, *place, ignore_index, label_smoothing, full_precision(logits), target)
    return losses.sum()


def token_log_probs(logits: Tensor, index: Tensor) -> Tensor:
    """Return ``logits.log_softmax(-1).gather(-1, index)`` of ``logits[..., V]`` and ``index[..., 1]``, in the dtype of the
    logits."""
    wide = full_precision(logits)
    return (wide.gather(-1, index) - wide.logsumexp(-1, keepdim=True)).to(logits.dtype)


def token_log_probs_sharded(logits: Tensor, index: Tensor, axis: AxisHandle) -> Tensor:
    """Return `token_log_probs` of ``logits[..., V / n]`` that are sharded by classes: Invariant, as `cross_entropy_sharded`."""
    if axis.size == 1:
        return token_log_probs(logits, index)
    place = axis.group_name, *axis.span(logits.shape[-1], index)
    losses: Tensor = apply(_ShardedCrossEntropy, *place, _NO_CLASS, 0.0, full_precision(logits), index.squeeze(-1))
    return losses.neg().unsqueeze(-1).to(logits.dtype)


class _ShardedLogSumExp(torch.autograd.Function):
    """Saves the local logits and the result."""

    @staticmethod
    def forward(ctx: Any, group: str, x: Tensor) -> Tensor:
        highest = wait_tensor(all_reduce(x.detach().amax(-1, keepdim=True), "max", group))
        highest = highest.masked_fill(highest.isinf(), 0.0)
        result = wait_tensor(all_reduce((x - highest).exp().sum(-1, keepdim=True), "sum", group)).log() + highest
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        return None, grad * (x - result).exp()


def logsumexp_sharded(x: Tensor, dim: Sequence[int], keepdim: bool = False, *, axis: AxisHandle) -> Tensor:
    """Return ``x.logsumexp(-1, keepdim)`` of ``x[..., V / n]`` that is sharded along its last dimension (`dim`): Invariant, as
    `cross_entropy_sharded`."""
    if axis.size == 1:
        return x.logsumexp(-1, keepdim)
    result: Tensor = apply(_ShardedLogSumExp, axis.group_name, full_precision(x))
    result = result.to(x.dtype) if x.is_floating_point() else result
    return result if keepdim else result.squeeze(-1)


def _in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, axis: AxisHandle, options: tuple[int, float, int],
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the loss and the gradients of those of x, weight and bias that are `wanted`, computed chunk by chunk, while the
    chunk's logits are there."""
    place = group, _, classes = axis.group_name, *axis.span(weight.shape[0], target)
    ignore, smoothing, chunk = options
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    of_rows = rows.new_empty(rows.shape) if wanted[0] else None
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    parts = []
    for start in range(0, max(1, rows.shape[0]), chunk):  # one chunk at least: of no tokens the gradients are zeros
        part = rows[start : start + chunk]
        logits = full_precision(F.linear(part, weight, bias))
        highest = logits.amax(-1)
        if group:
            highest = wait_tensor(all_reduce(highest, "max", group))
        result = _softmax(logits.sub_(highest.unsqueeze(-1)), targets[start : start + chunk], ignore, smoothing, place)
        loss, softmax, index, here, valid = result
        parts.append(loss.sum())
        if any(wanted):
            if smoothing:
                softmax.sub_(smoothing / classes)
            softmax.mul_(valid.unsqueeze(-1))
            hit = here.unsqueeze(-1).to(softmax.dtype).mul_(smoothing - 1)
            gradient = softmax.scatter_add_(-1, index, hit).to(weight.dtype)
            del logits, result, softmax  # no more than two of their size are there at once
            if of_rows is not None:
                of_rows[start : start + chunk] = gradient @ weight
            if wanted[1]:
                of_weight = gradient.t() @ part if of_weight is None else of_weight.addmm_(gradient.t(), part)
            if wanted[2]:
                of_bias = gradient.sum(0) if of_bias is None else of_bias.add_(gradient.sum(0))
            del gradient  # or it would be there beside the logits of the next chunk
    gradients = (None if of_rows is None else of_rows.view(x.shape), of_weight, of_bias)
    return [torch.stack(parts).sum(), *(each for each in gradients if each is not None)]


@torch.library.custom_op("autopar::linear_cross_entropy", mutates_args=())
def _traced_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, wanted: Sequence[bool], *, group: str, size: int,
    shares: Sequence[int], ignore: int, smoothing: float, chunk: int,
) -> list[Tensor]:  # fmt: skip
    """Return `_in_chunks`; compiled code calls it as it is, however many chunks there are."""
    axis = AxisHandle("", size, coordinate_in(group), group, tuple(shares)) if group else _WHOLE
    return _in_chunks(x, weight, bias, target, axis, (ignore, smoothing, chunk), wanted)


@_traced_chunks.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor, wanted: Sequence[bool], **options: Any) -> list[Tensor]:
    operands = [each for each, want in zip((x, weight, bias), wanted, strict=True) if want and each is not None]
    return [full_precision(x.new_empty(())), *(each.new_empty(each.shape) for each in operands)]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the head's operands in the forward: logits are never whole, and no product is repeated (Liger
    Kernel, arXiv 2410.10989, section 3.2). Saves the gradients, which the last backward scales in place."""

    @staticmethod
    def forward(
        ctx: Any,
        axis: AxisHandle,
        options: tuple[int, float, int],
        wanted: tuple[bool, bool, bool],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
    ) -> Tensor:
        results: list[Tensor]
        if torch.compiler.is_compiling():
            named = dict(zip(("ignore", "smoothing", "chunk"), options, strict=True))
            of_axis = {"group": axis.group_name, "size": axis.size, "shares": axis.shares}
            results = _traced_chunks(x, weight, bias, target, wanted, **of_axis, **named)
        else:
            results = _in_chunks(x, weight, bias, target, axis, options, wanted)
        loss, gradients = results[0], iter(results[1:])
        ctx.save_for_backward(*(next(gradients) if want else None for want in wanted))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # in place, unless another backward of the same graph may follow
        scale = Tensor.mul if torch.compiler.is_compiling() or keeps_graph() else Tensor.mul_
        return None, None, None, *(each if each is None else scale(each, grad) for each in ctx.saved_tensors), None


def linear_cross_entropy_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int,
    label_smoothing: float, chunk_tokens: int, axis: AxisHandle = _WHOLE,
) -> Tensor:  # fmt: skip
    """Return ``cross_entropy_sum(F.linear(x, weight, bias), target)`` without whole logits: of `chunk_tokens` at a time.

    Not torch's ``F.linear_cross_entropy``, which has no label smoothing, no sharded classes, and leaves a compiled graph.
    """
    trains = torch.is_grad_enabled()
    wanted = (trains and x.requires_grad, trains and weight.requires_grad, trains and bias is not None and bias.requires_grad)
    options = (ignore_index, label_smoothing, chunk_tokens)
    return apply(_ChunkedCrossEntropy, axis, options, wanted, x, weight, bias, target)  # type: ignore[no-any-return]


def linear_cross_entropy_sharded(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int,
    label_smoothing: float, chunk_tokens: int, axis: AxisHandle,
) -> Tensor:  # fmt: skip
    """Return `linear_cross_entropy_sum` of ``weight[V / n, D]``, sharded by classes: equal on all ranks of the axis, with two
    all-reduces a chunk. The gradient of `x` is this rank's part of the sum."""
    return linear_cross_entropy_sum(x, weight, bias, target, ignore_index, label_smoothing, chunk_tokens, axis)
