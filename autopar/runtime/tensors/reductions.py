"""Reductions of DTensors that 2.13.0 gets wrong, without a word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..comm.heartbeat import glancing
from ..comm.norms import whole_norms
from ..compat.dtensor import has_empty_part, on_whole_tensors, replicated, usual_operation, whole
from ..compat.hooks import shard_operations
from ..compat.torch_operations import loss_decompositions
from ..state.gradient import flat

_NO_SUMS = (
    *("any", "all", "prod", "max", "min", "amax", "amin", "aminmax", "dist"),
    "_foreach_max",
    "embedding",  # rows of other ranks are left out by a mask, which a sum of the result forgets
)
_SUMS = ("sum", "mean", "var", "std")


def reduce_rightly() -> AbstractContextManager[None]:
    """Teach DTensor reductions that are no sums (``p.norm()``, ``(p > 0).any(0)``): whole at once. It would add up their parts
    where they are read (``p.norm(dim=0).sum()``). And losses (``F.mse_loss(p, start)``), each made of operations whose rules are
    right: its own have the mean over a part in the place of that over the whole tensor, in the gradient too."""
    handlers: dict[Any, Any] = {op: _run_function(function) for op, function in loss_decompositions().items()}
    for packet in (getattr(torch.ops.aten, name) for name in _NO_SUMS):
        handlers.update((getattr(packet, each), _reduce) for each in packet.overloads() if "out" not in each)
    for packet in (getattr(torch.ops.aten, name) for name in _SUMS):
        handlers.update((getattr(packet, each), _sum) for each in packet.overloads() if "dim" in each or "correction" in each)
    for packet in (torch.ops.aten.norm, torch.ops.aten.linalg_vector_norm):
        handlers.update((getattr(packet, each), _reduce) for each in packet.overloads() if "out" not in each)
    handlers[torch.ops.aten.gather.default] = _gather
    handlers[torch.ops.aten._foreach_norm.Scalar] = _list_norms
    handlers[torch.ops.aten._is_any_true.default] = _run_function(torch.any)  # detect_anomaly() asks it; 2.13.0 has no rule
    handlers[torch.ops.aten._is_all_true.default] = _run_function(torch.all)
    return shard_operations(handlers)


def _run_function(function: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda _, args, kwargs: function(*args, **kwargs)


def _sum(op: Any, args: Any, kwargs: Any) -> Any:
    return usual_operation(op, _with_all_dims(op, args), kwargs)


def _with_all_dims(op: Any, args: Any) -> Any:
    """The arguments of a reduction with all dimensions in place of none, which torch takes for all, as in the backward of the
    maximum norm, and 2.13.0 for none."""
    at = next((at for at, each in enumerate(op._schema.arguments[: len(args)]) if each.name == "dim"), 0)
    return (*args[:at], list(range(args[0].dim())), *args[at + 1 :]) if at and args[at] == [] else args


def _reduce(op: Any, args: Any, kwargs: Any) -> Any:
    with glancing("a reduction of a sharded tensor"):
        if any(isinstance(each, DTensor) and has_empty_part(each) for each in flat(args)):
            return on_whole_tensors(op, args, kwargs)  # a rank without elements has no maximum
        return tree_map_only(DTensor, whole, usual_operation(op, _with_all_dims(op, args), kwargs))


def _gather(op: Any, args: Any, kwargs: Any) -> Any:
    """Pick elements: the rule is that of an index with all rows, and masks those of other ranks as that of rows does."""
    x, dim, index, *_ = args
    others = [at for at in range(x.dim()) if at != dim % x.dim()]
    has_all = all(index.shape[at] == x.shape[at] for at in others)
    return (_reduce if has_all else on_whole_tensors)(op, args, kwargs)


def _list_norms(op: Any, args: Any, kwargs: Any) -> Any:
    tensors, *order = args
    meshes = {each.device_mesh if isinstance(each, DTensor) else None for each in tensors}
    mesh = meshes.pop()
    if kwargs or len(order) > 1 or meshes or mesh is None:
        return _reduce(op, args, kwargs)
    return [replicated(norm.to(each.dtype), mesh) for norm, each in zip(whole_norms(tensors, *order), tensors, strict=True)]
