"""What one rank's tensors are: operations run on the meta device, which tells shapes, dtypes, and whether gradients flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.checker.reader import Applied, AxisName, Fixed, PlacedTensor
from autopar.checker.rows.operation_call import DTypeName

_LIKE_FIRST = frozenset(
    [
        "dropout",
        "attention",
        "attention_documents",
        "attention_rows",
        "attention_ring",
        "attention_heads",
        "moe_experts",
        "moe_experts_owned",
        "moe_experts_dispatched",
        "moe_experts_start",
        "expert_capacity",
    ]
)


def meta_tensor(shape: Sequence[int], dtype: str, gradient: bool = False) -> torch.Tensor:
    made = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
    return made.requires_grad_() if gradient and made.dtype.is_floating_point else made


def _plain(value: Any) -> Any:
    if isinstance(value, PlacedTensor):
        return value.local
    if isinstance(value, DTypeName):
        return getattr(torch, value.name)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, (Fixed, AxisName)) else value


def run(applied: Applied) -> tuple[torch.Tensor, ...] | None:
    """The results of an operation on one rank; None where only the captured shapes tell. Raises what torch raises."""
    namespace, name = applied.op.split(".")[:2]
    args, kwargs = [_plain(each) for each in applied.args], {k: _plain(v) for k, v in applied.kwargs.items()}
    kwargs.pop("sharded_axes", None)
    if namespace == "ap":
        found = _own(name, args, kwargs, applied)
        return None if found is None else (found,)
    tensors = any(isinstance(each, PlacedTensor) for each in _flat((*applied.args, *applied.kwargs.values())))
    if not tensors:
        kwargs["device"] = "meta"
    parts = applied.op.split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1])
    packet = getattr(packet, parts[2]) if len(parts) > 2 else packet
    result = packet(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [x for each in values for x in (_flat(each) if isinstance(each, tuple) else [each])]


def _own(name: str, args: list[Any], kwargs: dict[str, Any], applied: Applied) -> torch.Tensor | None:
    """The functions of the runtime: shape and dtype of their results."""
    tensors = [each for each in _flat(tuple(args)) + list(kwargs.values()) if isinstance(each, torch.Tensor)]
    gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)

    def made(shape: Sequence[int], dtype: torch.dtype | None = None, flows: bool = gradient) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype or tensors[0].dtype, device="meta")
        return out.requires_grad_() if flows and (out.is_floating_point() or out.is_complex()) else out

    if name == "linear_kn":
        return made(torch.matmul(args[0], args[1]).shape)
    if name == "linear_float8_dynamic":
        return made((*args[0].shape[:-1], args[1].shape[0]))
    if name == "embedding_sharded":
        return made((*args[0].shape, args[1].shape[1]), args[1].dtype)
    if name in ("cross_entropy_sum", "cross_entropy_sharded"):
        torch.broadcast_shapes(args[0].shape[:-1], args[1].shape)
        half = args[0].dtype in (torch.float16, torch.bfloat16)
        return made((), torch.float32 if half else args[0].dtype)
    if name == "count_valid":
        return made((), torch.float32, False)
    if name in _LIKE_FIRST:
        attends = name.startswith("attention")
        return made(
            (*args[0].shape[:-1], args[2].shape[-1]) if attends else args[0].shape, None, gradient and name != "expert_capacity"
        )
    if name == "random":
        return made(args[0].shape, kwargs["dtype"], False)
    if name == "constant":
        return torch.empty(tuple(args[0]), dtype=args[2], device="meta")
    if name == "local_mean":
        return made([1 if i in args[1] and i else n for i, n in enumerate(args[0].shape)])
    return None
