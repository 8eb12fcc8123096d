"""Operations that mix DTensors with ordinary tensors (`ema.lerp_(parameter, 0.1)`, `parameter.copy_(plain)`), which DTensor
refuses: an ordinary tensor is the whole tensor, with one value on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from ..comm.heartbeat import glancing
from ..compat.autograd import in_backward, mark_mixed, was_mixed
from ..compat.dtensor import gathered, is_elementwise, operations_of_shards, or_whole, replicated, usual_operation
from ..compat.hooks import shard_operations
from ..compat.torch_operations import new_results
from ..errors import StateError
from ..state.gradient import by_mesh, flat, on_each_mesh
from ..step.same_batch import checksum
from .random_draws import ranks_agree

_MIXED = ("copy", "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "maximum", "minimum")
_OF_WEIGHTS = (*_MIXED, "isclose", "eq", "ne", "lt", "le", "gt", "ge", "equal", "rsub")
"""Of averages and comparisons. The ordinary tensors of all others may be activations and indices, of which a rank may have its
own: they are compared first."""
_MIXING = "an operation of a sharded and an ordinary tensor"
_alike = ContextVar("alike", default=False)
_OF_LISTS = (
    *("copy", "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "sign", "abs", "pow", "reciprocal"),
    *("zero", "maximum", "minimum", "clamp_min", "clamp_max"),
)


def mix_whole_tensors() -> AbstractContextManager[None]:
    """Teach DTensor all operations that return something new, and those in place that averages and copies of weights are written
    with."""
    names = [*(f"{name}_" for name in _MIXED), *(f"_foreach_{name}_" for name in _OF_LISTS)]
    handlers = {torch.ops.aten._foreach_copy_.default: _mixed_by(_copy_all)}
    table = operations_of_shards()
    handlers.update((op, _mixed_by(table.get(op, usual_operation))) for op in new_results())
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if "out" not in overload and op not in handlers:
                handlers[op] = _mixed_by(table.get(op, usual_operation))
    return shard_operations(handlers)


def _mixed_by(usual: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def rule(op: Any, args: Any, kwargs: Any) -> Any:
        if op._schema.is_mutable:
            return usual(op, args, kwargs)
        # a product gathers shards: ranks that compute with matrices of their own (Muon by rank) wait for each other
        with nullcontext() if is_elementwise(op) else glancing(_words(op, args)):
            return or_whole(usual, op, args, kwargs)

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        if op._schema.name.startswith("aten::_foreach_") and len(parts := by_mesh(args[0])) > 1:
            return on_each_mesh(op, parts, args, kwargs)  # of an optimizer of several models
        plain = [each for each in flat(args) if _is_whole(each)]
        into_plain = op._schema.is_mutable and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor)
        if not (plain or into_plain) or (in_backward() and not all(map(was_mixed, plain or args[:1]))):
            return rule(op, args, kwargs)
        return _mixed(rule, op, args, kwargs)

    return run


def _words(op: Any, args: Any) -> str:
    """Return an operation of sharded tensors in the words of a message."""
    shapes = " and ".join(str(tuple(each.shape)) for each in flat(args) if isinstance(each, DTensor))
    return f"{op._schema.name.removeprefix('aten::')} of sharded tensors {shapes}"


def _copy_all(op: Any, args: Any, kwargs: Any) -> None:
    """2.13.0 has no rule for it."""
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source, *args[2:], **kwargs)


def _is_whole(value: Any) -> bool:
    """Return whether it is an ordinary tensor of more than one number (DTensor takes numbers itself)."""
    return not isinstance(value, DTensor) and isinstance(value, torch.Tensor) and value.dim() > 0


def _mixed(usual: Callable[[Any, Any, Any], Any], op: Any, args: Any, kwargs: Any) -> Any:
    every = list(flat(args))
    shards = [each for each in every if isinstance(each, DTensor)]
    plain = [each for each in every if _is_whole(each)]
    targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if not isinstance(targets[0], DTensor) and op._schema.is_mutable:
        for each in shards if torch.is_grad_enabled() else ():
            if each.requires_grad and not _has_placed_gradient(each):  # a penalty that is added into an ordinary tensor
                each.register_hook(_placed_gradient(each))
        return op(*tree_map_only(DTensor, gathered, args), **tree_map_only(DTensor, gathered, kwargs))
    mesh = shards[0].device_mesh
    if not _alike.get():
        check_alike(op, args)
    doing = "a write of an ordinary tensor into a sharded one" if op._schema.is_mutable else _MIXING
    for each in plain:
        mark_mixed(each)

    def placed(x: Any) -> Any:
        return replicated(x, mesh) if _is_whole(x) else x

    with glancing(doing):
        return usual(op, tree_map(placed, args), tree_map(placed, kwargs))


@contextmanager
def compared_before(op: Any, args: Any) -> Iterator[None]:
    """Compare the ordinary tensors of an operation on all ranks, where it has any, and not once more inside."""
    target = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if not any(map(_is_whole, flat(args))) or (op._schema.is_mutable and not isinstance(target, DTensor)):
        yield
        return
    check_alike(op, args)
    token = _alike.set(True)
    try:
        yield
    finally:
        _alike.reset(token)


def check_alike(op: Any, args: Any) -> None:
    """Raise a StateError on all ranks where they have different ordinary tensors for an operation with sharded ones."""
    shards = [each for each in flat(args) if isinstance(each, DTensor)]
    plain = [each for each in flat(args) if _is_whole(each)]
    writes = op._schema.is_mutable
    of_weights = op._schema.name.removeprefix("aten::").removeprefix("_foreach_") in _OF_WEIGHTS
    penalty = torch.is_grad_enabled() and any(each.requires_grad for each in shards)  # its backward gives what each rank has
    if in_backward() or not (writes or penalty or not of_weights):
        return
    doing = "a write of an ordinary tensor into a sharded one" if writes else _MIXING
    if not ranks_agree(hash(tuple(map(checksum, plain))) >> 9, shards[0], doing, all_stages=True):
        raise StateError(
            "ranks write different values into a parallel model's parameter or gradient: make the same tensor on every rank "
            "(seed alike, load it on all), or call parallel.load_state_dict(state)"
            if writes
            else f"ranks have different tensors in {op} with a parallel model's parameter or gradient: pass the same on every "
            "rank, that of the global batch"
        )


def _has_placed_gradient(value: DTensor) -> bool:
    """Return whether the gradient is placed already, as that of a parameter which is added in each step."""
    return any(getattr(hook, "autopar", False) for hook in (value._backward_hooks or {}).values())


def _placed_gradient(value: DTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that places the gradient of an ordinary tensor, which is the whole gradient on every rank."""
    mesh = value.device_mesh

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        return gradient if isinstance(gradient, DTensor) else replicated(gradient, mesh)

    placed.autopar = True  # type: ignore[attr-defined]  # no hook of the user's
    return placed
