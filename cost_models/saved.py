"""What autograd keeps of one operation until its backward: asked of torch, on meta tensors, under saved-tensor hooks.

Storage identity tells operands, results and extras apart. Attention is declared, since its kernel depends on the device: flash
attention keeps q, k, v, the mask, its result and one float32 log-sum-exp per query (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from autopar.ir import dims
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value

_SAMPLE_BATCH = 8
"""A batch that usual divisors of the batch accept; ratios do not depend on it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Which operands and results are kept, and other tensors as a multiple of the bytes of `reference`: an operand's index, or
    ``-1 - index`` of a result. `known` is false where torch could not run the operation: then all of it is taken to be kept.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    extra_ratio: float = 0.0
    reference: int = 0
    known: bool = True


def saved_tensors(node: Node, values: Mapping[str, Value]) -> Saved:
    """What the backward of `node` needs."""
    operands = tuple(values[name] for name in node.operands())
    nothing = Saved((False,) * len(operands), (False,) * len(node.outputs))
    if node.no_grad or not any(v.differentiable for v in operands) or not any(v.differentiable for v in node.outputs):
        return nothing
    return _asked(_Question.of(node, operands))


@dataclass(frozen=True, slots=True)
class _Question:
    """An operation without names: the key of the cache."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[tuple[dims.Shape, str, bool], ...]
    results: tuple[tuple[dims.Shape, str, bool], ...]

    @staticmethod
    def of(node: Node, operands: tuple[Value, ...]) -> _Question:
        def anonymous(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref("")
            return tuple(map(anonymous, arg)) if isinstance(arg, tuple) else arg

        def key(value: Value) -> tuple[dims.Shape, str, bool]:
            return value.shape, value.dtype, value.differentiable

        kwargs = tuple((name, anonymous(arg)) for name, arg in node.kwargs)
        return _Question(
            node.op, tuple(map(anonymous, node.args)), kwargs, tuple(map(key, operands)), tuple(map(key, node.outputs))
        )


@lru_cache(maxsize=8192)
def _asked(question: _Question) -> Saved:
    if question.op == "aten.scaled_dot_product_attention":
        return _attention(question)
    try:
        return _observed(question)
    except Exception:  # noqa: BLE001  whatever torch refuses (a custom operation, a form without a meta kernel) is taken to keep all
        kept = tuple(differentiable for *_, differentiable in question.operands)
        return Saved(kept, (True,) * len(question.results), known=False)


def _bytes(shape: dims.Shape, dtype: str) -> int:
    return prod(dims.values(shape, _SAMPLE_BATCH)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _attention(question: _Question) -> Saved:
    (shape, dtype, _) = question.operands[0]
    logsumexp = 4 * prod(dims.values(shape, _SAMPLE_BATCH)[:-1])
    return Saved((True,) * len(question.operands), (True,), logsumexp / _bytes(shape, dtype), 0)


def _observed(question: _Question) -> Saved:
    tensors = [
        torch.empty(dims.values(shape, _SAMPLE_BATCH), dtype=getattr(torch, dtype), device="meta", requires_grad=differentiable)
        for shape, dtype, differentiable in question.operands
    ]
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_storage(tensor), tensor.detach())
        return tensor

    rest = iter(tensors)
    args = [_concrete(arg, rest) for arg in question.args]
    kwargs = {name: _concrete(arg, rest) for name, arg in question.kwargs}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        returned = _function(question.op)(*args, **kwargs)
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    operands = tuple(kept.pop(_storage(tensor), None) is not None for tensor in tensors)
    results = tuple(kept.pop(_storage(output), None) is not None for output in outputs)
    extra = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    results = (*results, *(False,) * (len(question.results) - len(results)))
    return Saved(operands, results, *_relative(question, extra))


def _relative(question: _Question, extra_bytes: int) -> tuple[float, int]:
    """Extras as a multiple of the largest result, or of the largest operand where the results are smaller than the extras."""
    if not extra_bytes:
        return 0.0, 0
    results = [_bytes(shape, dtype) for shape, dtype, _ in question.results]
    operands = [_bytes(shape, dtype) for shape, dtype, _ in question.operands]
    index = max(range(len(results)), key=results.__getitem__)
    if results[index] >= extra_bytes:
        return extra_bytes / results[index], -1 - index
    index = max(range(len(operands)), key=operands.__getitem__)
    return extra_bytes / operands[index], index


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _concrete(arg: Arg, tensors: Any) -> Any:
    match arg:
        case Ref():
            return next(tensors)
        case Symbol():
            return dims.value(arg.dim, _SAMPLE_BATCH)
        case DType():
            return getattr(torch, arg.name)
        case tuple():
            return [_concrete(item, tensors) for item in arg]
        case _:
            return arg


def _linear_kn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return out.reshape(*x.shape[:-1], weight.shape[1])


def _cross_entropy_sum(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    flat, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    return F.cross_entropy(flat, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")


def _dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """As CUDA does it: a mask of one byte an element, not of x's dtype."""
    return torch.ops.aten.native_dropout(x, p, True)[0]  # type: ignore[no-any-return]


def _function(op: str) -> Any:
    own = {"ap.linear_kn": _linear_kn, "ap.cross_entropy_sum": _cross_entropy_sum, "ap.dropout": _dropout}
    if op in own:
        return own[op]
    namespace, name, *overload = op.split(".")
    found = getattr(getattr(torch.ops, namespace), name)
    return getattr(found, overload[0]) if overload else found
