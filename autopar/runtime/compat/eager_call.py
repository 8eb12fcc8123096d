"""A function that torch.compile does not trace, as two operators of compiled code: the call, and its gradients.

The call runs as it is, with autograd. What autograd saves inside rides on a *handle*, a tensor that compiled code saves for its
backward like any other and frees with it; but operands do not: the second operator gets them again, so that the compiled backward
may recompute them. A call that is recomputed has a new handle. Seen on 2.13.0: a storage has its Python attributes as long as
autograd or compiled code holds a tensor of it, which need not be the same tensor.

A function may send tensors and return what is in flight, a named tuple whose first `tokens` carry gradients and no values.
Compiled code sees the handle alone; where that is an operand of another call, the function of that one gets what is in flight.
The gradient of a handle is a handle, of gradients in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from .autograd import apply, autograd_in_kernel, saved_tensor, storage_key, storage_span


def call_eagerly(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the result of ``function(*operands)`` (None: it is in flight), and the handle of the call. `wanted`: the operands
    whose gradients are wanted."""
    handle = operands[0].new_zeros(())
    saved = _Operands(operands)
    with autograd_in_kernel(), torch.set_grad_enabled(any(wanted)), saved.left_out():
        entries = [_entry(x, want) for x, want in zip(operands, wanted, strict=True)]
        result = function(*(argument for argument, _ in entries))
        flying = None if isinstance(result, torch.Tensor) else result
        outputs = [apply(_Leave, result)] if flying is None else [each for each in flying.tokens if each.requires_grad]
    leaves = [own for (_, own), want in zip(entries, wanted, strict=True) if want]
    if any(wanted) or flying is not None:
        _ride(handle, _EagerCall(saved, leaves, outputs, flying))
    saved.tensors = ()
    return (result.detach().contiguous() if flying is None else None), handle


def gradients_of(handle: torch.Tensor, grad: torch.Tensor, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of the operands whose gradients are wanted; of a call that sent tensors from that of its handle.
    Again, for another backward, they are the same."""
    call: _EagerCall = _riding(handle)
    call.saved.tensors = operands
    leaves = [leaf for own in call.leaves for leaf in (own if isinstance(own, list) else [own])]
    with autograd_in_kernel():
        of_outputs = [grad] if call.flying is None else _riding(grad)
        found = iter(torch.autograd.grad(call.outputs, leaves, of_outputs, retain_graph=True, materialize_grads=True))
    call.saved.tensors = ()
    results = []
    for own in call.leaves:
        if isinstance(own, torch.Tensor):
            results.append(next(found).contiguous())
            continue
        results.append(_ride(handle.new_zeros(()), [next(found) for _ in own]))
    return results


class _EagerCall(NamedTuple):
    """The graph of a call: the gradients of its `leaves` follow from those of `outputs`. `leaves`: that of each operand whose
    gradient is wanted, several for a handle. `flying`: what the call sent."""

    saved: _Operands
    leaves: list[torch.Tensor | list[torch.Tensor]]
    outputs: list[torch.Tensor]
    flying: Any


class _Operands:
    """The operands of a call by storage; `tensors` are there only while the call or its backward runs."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.strides = [each.stride() for each in tensors]
        self.index = {storage_key(each): index for index, each in enumerate(tensors)}

    def left_out(self) -> saved_tensors_hooks:
        """A context in which autograd does not save what operands have."""
        return saved_tensors_hooks(self._pack, saved_tensor)

    def _pack(self, x: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        index = self.index.get(storage_key(x))
        if index is None:
            return x
        (start, end), (first, last) = storage_span(x), storage_span(self.tensors[index])
        if start < first or end > last:
            return x
        return partial(self._view, index, tuple(x.shape), x.stride(), start - first)

    def _view(self, number: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """The view of an operand, `offset` elements from its first one."""
        x, own = self.tensors[number], self.strides[number]
        if x.stride() != own:  # compiled code may lay out in another way what it recomputes
            x = torch.empty_strided(x.shape, own, dtype=x.dtype, device=x.device).copy_(x)
        return x.as_strided(shape, stride, x.storage_offset() + offset)


def _ride(handle: torch.Tensor, value: Any) -> torch.Tensor:
    storage: Any = handle.untyped_storage()
    storage.rides = value
    return handle


def _riding(x: torch.Tensor) -> Any:
    """Return what rides on a handle; None of another tensor."""
    return getattr(x.untyped_storage(), "rides", None)


def _entry(x: torch.Tensor, want: bool) -> tuple[Any, torch.Tensor | list[torch.Tensor]]:
    """Return an operand as the function gets it, and the leaf of its gradient, or those of what a handle has in flight."""
    earlier: _EagerCall | None = _riding(x)
    if earlier is None:
        leaf = _stub_of(x).requires_grad_(want)
        return (apply(_Enter, leaf, x) if want else x), leaf
    leaves = [_stub_of(each).requires_grad_(want) for each in earlier.outputs]
    return earlier.flying._replace(tokens=(*leaves, *earlier.flying.tokens[len(leaves) :])), leaves


def _stub_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape of `x` without memory of its own."""
    return x.new_zeros(()).expand(x.shape)


class _Enter(torch.autograd.Function):
    """An operand whose gradient is that of its leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Leave(torch.autograd.Function):
    """A stub with the gradient of a result, whose memory it does not hold."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return _stub_of(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad
