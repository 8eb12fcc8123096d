"""``torch.nn.attention.varlen.varlen_attn`` as attention under a mask of documents, which `normalize.documents` recognizes.

Its operands are tokens one after the other ``[T, H, D]``, and where documents end among them (``cu_seqlens``). The kernel runs on
GPUs only. Tokens of a batch ``[B, S]`` are rows of S here, each of which ends a document, so that examples stay apart and the
sequence can be sharded; the program refuses documents that do not end there. Tokens that are the batch themselves, ``[T]``, are
one row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.capture.tracing.places import user_line
from autopar.errors import CaptureError

_ARGUMENTS = """query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size enable_gqa seqused_k block_table
num_splits"""
_DEFAULTS = {"is_causal": False, "window_size": None, "enable_gqa": False}
_SIGNATURE = Signature(
    [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=_DEFAULTS.get(name)) for name in _ARGUMENTS.split()]
)
"""The arguments of the operator ``torch_attn::_varlen_attn`` of torch 2.13; those of earlier versions are the first of these."""


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """A call of the operator: queries, keys and values ``[T, H, D]``, `ends` the ``cu_seqlens`` of queries and of keys, and the
    keys before and after a query that it sees (-1: all of its document)."""

    tensors: tuple[Tensor, Tensor, Tensor]
    ends: tuple[Tensor, Tensor]
    scale: float | None
    grouped: bool
    window: tuple[int, int]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> VarlenCall:
        """Read the arguments. CaptureError for a cache of keys, and for keys of other documents."""
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        q, k, v = (given[name] for name in ("query", "key", "value"))
        if given["seqused_k"] is not None or given["block_table"] is not None or given["cu_seq_k"] is None:
            raise CaptureError(
                f"{user_line()}: varlen_attn with a cache of keys (seqused_k, block_table) is for generation: leave them out"
            )
        if given["cu_seq_q"].shape != given["cu_seq_k"].shape or q.shape[0] != k.shape[0]:
            raise CaptureError(
                f"{user_line()}: varlen_attn between documents of other lengths (cu_seq_q {_shape(given['cu_seq_q'])}, cu_seq_k "
                f"{_shape(given['cu_seq_k'])}): call scaled_dot_product_attention with a mask (document[q] == document[k])"
            )
        left, right = given["window_size"] or (-1, -1)
        right = 0 if given["is_causal"] else right
        ends = given["cu_seq_q"], given["cu_seq_k"]
        return VarlenCall((q, k, v), ends, given["scale"], q.shape[1] != k.shape[1], (left, right))

    def among(self, at: Tensor) -> Tensor | None:
        """Return which keys at positions `at` the queries there see by their distance; None: all."""
        distance, (left, right) = at.unsqueeze(1) - at.unsqueeze(0), self.window
        near = [*([distance >= -right] if right >= 0 else []), *([distance <= left] if left >= 0 else [])]
        return near[0] & near[-1] if near else None


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


class VarlenAttention(TorchFunctionMode):
    """While active, the operator gives what `attend` makes of its call. CaptureError where the sums of its softmax are asked for
    too."""

    def __init__(self, attend: Callable[[VarlenCall], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "_qualified_op_name", "") != "torch_attn::_varlen_attn":
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name != "varlen_attn":
            frame = frame.f_back
        if frame.f_locals.get("return_aux") is not None:
            raise CaptureError(f"{user_line()}: varlen_attn with return_aux is not supported: leave it out")
        return self.attend(VarlenCall.of(args, kwargs or {})), None, None


@lru_cache(maxsize=1)
def _operator() -> Any:
    from autopar.runtime.ops.attention.documents import document_numbers as run

    @torch.library.custom_op("ap::document_numbers", mutates_args=())
    def document_numbers(ends: Tensor, others: Tensor, tokens: int, rows: int) -> Tensor:
        return run(ends, others, tokens, rows)

    @document_numbers.register_fake
    def _(ends: Tensor, others: Tensor, tokens: int, rows: int) -> Tensor:
        return ends.new_empty(tokens, dtype=torch.int64)

    return document_numbers


def under_mask(examples: int | torch.SymInt) -> Callable[[VarlenCall], Tensor]:
    """Return what attends under a mask, in a model whose inputs hold so many examples."""

    def attend(call: VarlenCall) -> Tensor:
        tokens: Any = call.tensors[0].shape[0]
        rows = examples if tokens % examples == 0 and tokens // examples != 1 else 1
        length = tokens // rows
        numbers = _operator()(*call.ends, tokens, rows).view(rows, 1, length)
        mask = numbers.unsqueeze(-1) == numbers.unsqueeze(-2)
        near = call.among(torch.arange(length, device=numbers.device))
        mask = mask if near is None else mask & near
        q, k, v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in call.tensors)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=call.scale, enable_gqa=call.grouped)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def one_at_a_time(call: VarlenCall) -> Tensor:
    """Attend to each document by itself: what the kernel means, on any device."""
    from autopar.runtime.ops.attention.documents import document_numbers

    document_numbers(*call.ends, call.tensors[0].shape[0], 1)
    ends, parts = call.ends[0].tolist(), []
    for start, end in zip(ends, ends[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1) for x in call.tensors)
        near = call.among(torch.arange(end - start, device=q.device))
        parts.append(F.scaled_dot_product_attention(q, k, v, near, scale=call.scale, enable_gqa=call.grouped).transpose(0, 1))
    return torch.cat(parts)
