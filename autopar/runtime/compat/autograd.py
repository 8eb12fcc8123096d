"""Autograd Functions, the graph of a backward, the backward that runs now, and tensors by their storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``; torch's own is untyped. Seen on 2.13.0: without gradients torch.compile takes a forward
    with two tensors at its end (``*xs``) for one without a context."""
    if torch.compiler.is_compiling():
        trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        if not trains:
            forward: Any = function.forward
            return forward(_NoBackward(), *args)
        return function.apply(*args)
    return _passing_none(function).apply(*args)


@cache
def _passing_none(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The Function whose backward gives None where nothing has read its outputs, as torch's own operations do; that of some of
    several outputs has None for the others. Torch would pass zeros, which the parameters of a head that no loss reads would get
    as gradients."""
    kind: Any = function

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return kind.forward(ctx, *args)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return kind.backward(ctx, *grads)

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    passing: type[torch.autograd.Function] = type(kind)(function.__name__, (function,), functions)
    return passing


class _NoBackward:
    """The context of a forward that no backward follows."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        pass

    mark_non_differentiable = save_for_backward


def outside_of_checkpoint() -> AbstractContextManager[None]:
    """A context in which ``torch.utils.checkpoint`` around it recomputes nothing. Its recomputation ends as soon as it has what
    the backward needs, which leaves collectives half done. Seen on 2.13.0."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """A context outside of ``torch.inference_mode()``, without gradients where it was on: what is made in it can train later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def alias(x: torch.Tensor) -> torch.Tensor:
    """A new tensor over the same data, for the result of an autograd.Function.

    Compiled code that returns a view of another of its results rebuilds the view outside of the graph, which loses the function's
    backward. Seen on 2.13.0; what ``_unsafe_view`` makes has no base.
    """
    if not torch.compiler.is_compiling():
        return x.view_as(x)
    result: torch.Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return result


@contextmanager
def autograd_in_kernel() -> Iterator[None]:
    """Enable autograd inside the kernel of a custom operator, where dispatch leaves it out. Seen on 2.13.0."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, name))
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)
    with guard, torch.enable_grad():
        yield


def keeps_graph() -> bool:
    """Return whether the backward that is running now leaves its graph to another one (``retain_graph=True``). Seen on 2.13.0."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now ends. Seen on 2.13.0 (FSDP2 and DDP use the same)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Return whether this thread runs inside a backward. Seen on 2.13.0."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs now (grad, vmap), or forward-mode differentiation. Seen on 2.13.0."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of several at once, of ``is_grads_batched=True``. Seen on 2.13.0."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor) or torch._C._functorch.is_batchedtensor(tensor))


def graph_of(results: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes that a backward of the results may run. Seen on 2.13.0."""
    waiting = [each.grad_fn for each in results if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        waiting += further


def has_data(x: torch.Tensor) -> bool:
    """Return whether the tensor has values: fake tensors (dry run), those that AOTAutograd traces with, and meta tensors have
    only shapes. Seen on 2.13.0."""
    return not (x.is_meta or isinstance(x, (FakeTensor, FunctionalTensor)))


def sole_holder(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor has this one's storage. Seen on 2.13.0: one count is the tensor's, one is
    `untyped_storage()`'s."""
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


def storage_key(tensor: torch.Tensor) -> object:
    """A key that is equal exactly for tensors of one storage, as long as the key lives. Seen on 2.13.0: a weak reference, which
    keeps the address of a freed storage from being reused."""
    return StorageWeakRef(tensor.untyped_storage())


def storage_span(x: torch.Tensor) -> tuple[int, int]:
    """The range of elements of its storage that a tensor spans: start, end."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return int(x.storage_offset()), int(x.storage_offset() + last + 1)


def mark_mixed(x: torch.Tensor) -> None:
    """Note that an operation took an ordinary tensor for a whole one, as its backward must too. Seen on 2.13.0: a storage has its
    Python attributes as long as autograd holds a tensor of it."""
    storage: Any = x.untyped_storage()
    storage.autopar_mixed = True


def was_mixed(x: torch.Tensor) -> bool:
    """Return whether `mark_mixed` was told of a tensor, or of one that this is a view of."""
    return hasattr(x.untyped_storage(), "autopar_mixed")


def saved_tensor(saved: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what was saved: a tensor, or what the function in its place gives in the backward."""
    return saved if isinstance(saved, torch.Tensor) else saved()
