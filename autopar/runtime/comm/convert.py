"""Placement conversions (DTensor's redistribute) on one mesh axis, differentiable: the backward runs the exact dual.

A conversion is written as text, ``"S(1) -> R"``; `conversions` says what it does in the forward and in the backward. `parts` in
``S(dim,parts)`` counts the parts of the local tensor. `start` and `wait` split one conversion in two: the program computes
between them, while the collective is in flight. In the backward `wait` starts the dual collective, and `start` waits for it. All
of it traces: torch.compile sees functional collectives and no graph breaks.

Conversions of several tensors are one flat collective for each kind, reduction and dtype (*coalesced*). Tensors are laid out as
``[rows, k]`` with one row for each receiving rank (or one row in all), and concatenated along the second dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch

from ..compat.autograd import alias, apply
from ..compat.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, wait_tensor
from ..compat.unread_outputs import marked_one_by_one
from ..device.axis import AxisHandle, place_in
from .conversions import AxisOperation, apply_locally, join_shards, parse_conversion, result_shape, split_shards
from .uneven import convert_uneven


class _Convert(torch.autograd.Function):
    """Converts several tensors at once, with coalesced collectives in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, texts: tuple[str, ...], size: int, coordinate: int, group: str, *xs: torch.Tensor) -> Any:
        ctx.texts, ctx.size, ctx.coordinate, ctx.group = texts, size, coordinate, group
        operations = [parse_conversion(text)[0] for text in texts]
        return tuple(_finish(operations, xs, _launch(operations, xs, size, group), size, coordinate, group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        there = [grad for grad in grads if grad is not None]
        duals = [parse_conversion(text)[1] for text, grad in zip(ctx.texts, grads, strict=True) if grad is not None]
        results = iter(_finish(duals, there, _launch(duals, there, ctx.size, ctx.group), ctx.size, ctx.coordinate, ctx.group))
        return (None, None, None, None, *(None if grad is None else next(results) for grad in grads))


def convert(x: torch.Tensor, axis: AxisHandle, text: str, *, micro_batches: int = 1) -> torch.Tensor:
    """Return `x` in another placement on `axis`; on an axis of one rank, `x` itself. `micro_batches`: so many have `x` alike, and
    add it to a sum over all of them."""
    if micro_batches > 1:
        x = x / micro_batches
    if axis.size == 1:
        return x
    if x.is_complex():  # collectives take pairs of real numbers
        return torch.view_as_complex(convert(torch.view_as_real(x.resolve_conj()), axis, text).contiguous())
    if axis.shares:
        return convert_uneven(x, axis, text)
    (result,) = apply(_Convert, (text,), axis.size, axis.coordinate, axis.group_name, x)
    return result  # type: ignore[no-any-return]


def convert_many(xs: Sequence[torch.Tensor], axis: AxisHandle, text: str | Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Several conversions, with one coalesced collective of each kind and dtype each way. `text`: one for all, or one each."""
    if axis.size == 1:
        return tuple(xs)
    texts = (text,) * len(xs) if isinstance(text, str) else tuple(text)
    if any(x.is_complex() for x in xs):
        return tuple(convert(x, axis, each) for x, each in zip(xs, texts, strict=True))
    if axis.shares:
        return tuple(convert_uneven(x, axis, each) for x, each in zip(xs, texts, strict=True))
    with marked_one_by_one(_order_of_use(texts, xs)) if torch.compiler.is_compiling() else nullcontext():
        return apply(_Convert, texts, axis.size, axis.coordinate, axis.group_name, *xs)  # type: ignore[no-any-return]


def _order_of_use(texts: Sequence[str], xs: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of the tensors as the forward comes to them: those that communicate, then the others."""
    operations = [parse_conversion(text)[0] for text in texts]
    communicating = [place for places in _coalesced(operations, xs) for place in places]
    return [*communicating, *(place for place in range(len(xs)) if place not in communicating)]


class PendingConversion(NamedTuple):
    """A conversion in flight. `token` has the shape of the input and carries the gradient; `raw` is the collective's output."""

    token: torch.Tensor
    raw: torch.Tensor | None
    axis: AxisHandle
    text: str


class _Start(torch.autograd.Function):
    """Launches the collective. In the backward the gradient arrives in a carrier: the output of the dual collective, still in
    flight, with as many elements as the input."""

    @staticmethod
    def forward(ctx: Any, text: str, size: int, coordinate: int, group: str, x: torch.Tensor) -> Any:
        forward, ctx.dual = parse_conversion(text)
        ctx.size, ctx.coordinate, ctx.shape = size, coordinate, result_shape(forward, x.shape, size)
        raw = _launch([forward], [x], size, group)[0] if forward.communicates else apply_locally(forward, x, size, coordinate)
        ctx.mark_non_differentiable(raw)
        return x.new_zeros(()).expand(x.shape), raw

    @staticmethod
    def backward(ctx: Any, carrier: torch.Tensor, _: torch.Tensor) -> Any:
        if not ctx.dual.communicates:
            return None, None, None, None, carrier
        like = carrier.new_zeros(()).expand(ctx.shape)
        return None, None, None, None, _finish([ctx.dual], [like], [carrier.view(-1)], ctx.size, ctx.coordinate)[0]


class _Wait(torch.autograd.Function):
    """Waits for the collective. In the backward it launches the dual of it on the gradient."""

    @staticmethod
    def forward(ctx: Any, text: str, size: int, coordinate: int, group: str, token: torch.Tensor, raw: torch.Tensor) -> Any:
        forward, ctx.dual = parse_conversion(text)
        ctx.size, ctx.coordinate, ctx.group, ctx.shape = size, coordinate, group, token.shape
        return _finish([forward], [token], [raw], size, coordinate)[0] if forward.communicates else alias(raw)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.dual.communicates:
            carrier = _launch([ctx.dual], [grad], ctx.size, ctx.group)[0].view(ctx.shape)
        else:
            carrier = apply_locally(ctx.dual, grad, ctx.size, ctx.coordinate)
        return None, None, None, None, carrier, None


def start(x: torch.Tensor, axis: AxisHandle, text: str) -> PendingConversion:
    """Start a conversion; `wait` returns its result. In compiled code it is whole: that starts and awaits collectives as
    `compat.compile` says, and finds those that run in pieces beside products."""
    if axis.size == 1:
        return PendingConversion(x, None, axis, text)
    if axis.shares or x.is_complex() or torch.compiler.is_compiling() or _needs_gather(parse_conversion(text)[0], x):
        return PendingConversion(convert(x, axis, text), None, axis, text)
    token, raw = apply(_Start, text, axis.size, axis.coordinate, axis.group_name, x)
    return PendingConversion(token, raw, axis, text)


def wait(pending: PendingConversion) -> torch.Tensor:
    """The result of `start`."""
    token, raw, axis, text = pending
    if raw is None:
        return token
    return apply(_Wait, text, axis.size, axis.coordinate, axis.group_name, token, raw)  # type: ignore[no-any-return]


# -- coalesced collectives


def _needs_gather(operation: AxisOperation, x: torch.Tensor) -> bool:
    """An all-to-all within one dimension (between different `parts`) is done by an all-gather and a slice."""
    return operation.kind == "all_to_all" and operation.dim % x.dim() == operation.to % x.dim()


def _rows(operation: AxisOperation, x: torch.Tensor, size: int) -> torch.Tensor:
    """The layout that the collective reads, ``[rows, k]``."""
    if operation.kind == "reduce_scatter":
        return split_shards(x, operation.dim, operation.parts, size).reshape(size, -1)
    if operation.kind == "all_to_all" and not _needs_gather(operation, x):
        return split_shards(x, operation.to, operation.to_parts, size).reshape(size, -1)
    return x.reshape(1, -1)


def _shape(operation: AxisOperation, x: torch.Tensor, size: int) -> list[int]:
    """The shape of one received row."""
    shape = list(x.shape)
    if operation.kind == "reduce_scatter":
        shape[operation.dim] //= size
    if operation.kind == "all_to_all" and not _needs_gather(operation, x):
        shape[operation.to] //= size
    return shape


def _communicate(kind: str, op: str, flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    if kind == "all_reduce":
        return all_reduce(flat, op, group)
    if kind == "reduce_scatter":
        return reduce_scatter(flat, op, size, group)
    if kind == "all_to_all":
        return all_to_all(flat, size, group)
    return all_gather(flat, size, group)


def _kind(operation: AxisOperation, x: torch.Tensor) -> str:
    return "gather" if _needs_gather(operation, x) else operation.kind


def _coalesced(operations: Sequence[AxisOperation], xs: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of the communicating tensors that share a collective: same kind, reduction and dtype."""
    groups: dict[tuple[str, str, torch.dtype], list[int]] = {}
    for index, (operation, x) in enumerate(zip(operations, xs, strict=True)):
        if operation.communicates:
            groups.setdefault((_kind(operation, x), operation.op, x.dtype), []).append(index)
    return list(groups.values())


def _launch(operations: Sequence[AxisOperation], xs: Sequence[torch.Tensor], size: int, group: str) -> list[torch.Tensor]:
    """Launch one collective for each group of tensors that can share one; return their outputs, still in flight."""
    raws = []
    for indices in _coalesced(operations, xs):
        if len(indices) == 1 and _is_plain(operations[indices[0]]):
            raws.append(_launch_plain(operations[indices[0]], xs[indices[0]], size, group))
            continue
        rows = [_rows(operations[i], xs[i], size) for i in indices]
        flat = (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).contiguous()
        first = operations[indices[0]]
        raws.append(_communicate(_kind(first, xs[indices[0]]), first.op, flat.view(-1), size, group))
    return raws


def _finish(
    operations: Sequence[AxisOperation], xs: Sequence[torch.Tensor], raws: Sequence[torch.Tensor], size: int, coordinate: int,
    group: str = "",
) -> list[torch.Tensor]:  # fmt: skip
    """The results in the order of `xs`, whose values are read only where an operation needs no communication. `group`: of what is
    compiled too, in which ranks have one graph."""
    out: list[torch.Tensor | None] = [None] * len(xs)
    for index, (operation, x) in enumerate(zip(operations, xs, strict=True)):
        if not operation.communicates:
            out[index] = _apply(operation, x, size, coordinate, group)
    for indices, raw in zip(_coalesced(operations, xs), raws, strict=True):
        if len(indices) == 1 and _is_plain(operations[indices[0]]):
            out[indices[0]] = _finish_plain(operations[indices[0]], xs[indices[0]], raw, size)
            continue
        rows = size if _kind(operations[indices[0]], xs[indices[0]]) in ("gather", "all_to_all") else 1
        received = wait_tensor(raw).view(rows, -1)
        offset = 0
        for i in indices:
            shape = _shape(operations[i], xs[i], size)
            width = prod(shape)
            # contiguous: the backward of torch's batch norm on CPUs reads the memory of a weight as if it were without gaps
            part = received if len(indices) == 1 else received.narrow(1, offset, width).contiguous()
            offset += width
            out[i] = _assemble(operations[i], xs[i], part.reshape(rows, *shape), size, coordinate, group)
    return [x for x in out if x is not None]


def _apply(operation: AxisOperation, x: torch.Tensor, size: int, coordinate: int, group: str) -> torch.Tensor:
    return apply_locally(operation, x, size, place_in(group, coordinate, x) if operation.differs_by_rank else coordinate)


# -- one tensor, in one part: in the form that torch's asynchronous tensor parallelism knows (`compat.async_tp`)


def _is_plain(operation: AxisOperation) -> bool:
    return operation.kind in ("gather", "reduce_scatter") and operation.parts == 1


def _launch_plain(operation: AxisOperation, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    if operation.kind == "gather":
        return all_gather(x.contiguous(), size, group)
    dim = operation.dim % x.dim()
    shards = torch.cat(x.chunk(size, dim)) if dim else x.contiguous()
    return reduce_scatter(shards, operation.op, size, group)


def _finish_plain(operation: AxisOperation, x: torch.Tensor, raw: torch.Tensor, size: int) -> torch.Tensor:
    shape, dim = list(x.shape), operation.dim % x.dim()
    if operation.kind == "reduce_scatter":
        shape[dim] //= size
        return wait_tensor(raw).view(shape)
    whole = wait_tensor(raw).view(size * shape[0], *shape[1:])
    # not split: of a tensor without rows that is one piece, whatever its other dimensions
    return torch.cat(whole.chunk(size), dim) if dim else whole


def _assemble(
    operation: AxisOperation, x: torch.Tensor, stacked: torch.Tensor, size: int, coordinate: int, group: str
) -> torch.Tensor:
    if operation.kind in ("all_reduce", "reduce_scatter"):
        return stacked.squeeze(0)
    whole = join_shards(stacked, operation.dim, operation.parts)
    if _needs_gather(operation, x):
        return _apply(AxisOperation("slice", operation.to, operation.to_parts), whole, size, coordinate, group)
    return whole
