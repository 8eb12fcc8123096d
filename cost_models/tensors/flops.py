"""Forward FLOPs of operations, and kinds of operations that are priced alike (views, lookups, attention, experts, ...)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod

from autopar.cost_models.tensors.expert_shapes import ExpertShapes
from autopar.ir.graph import Node
from autopar.operations.notation.rule import argument

Sizes = tuple[int, ...]

VIEWS = frozenset(
    "aten." + name
    for name in (
        *("reshape", "view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select"),
        *("split", "split_with_sizes", "chunk", "unbind", "narrow", "detach", "alias", "unflatten", "flatten", "numpy_T"),
        *("expand_as", "view_as", "swapaxes", "movedim", "tensor_split"),
    )
)
"""Operations whose forward only changes strides, and runs no kernel."""

SLICING_VIEWS = frozenset(
    "aten." + name for name in ("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "expand")
)
"""Views whose backward writes a gradient of another size."""

LOOKUPS = frozenset(["aten.embedding", "aten.index_select", "aten.gather", "aten.index", "aten.embedding_bag"])
"""Operations that read of their first operand only as much as they return."""


ATTENTION = frozenset(["aten.scaled_dot_product_attention", "ap.attention", "ap.context_attention"])
"""Attention in one kernel, which saves no scores."""

TRANSCENDENTAL = frozenset(
    "aten." + name
    for name in ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "softmax", "log_softmax", "elu", "pow", "dropout")
) | frozenset(["ap.dropout", "ap.random", "ap.cross_entropy_sum"])
"""Operations with a transcendental function, or a random number, for each element."""

EXPERTS = frozenset(["ap.moe_experts", "ap.experts", "ap.experts_float8"])
"""Routed experts."""

LOSSES = frozenset(["ap.cross_entropy_sum", "ap.cross_entropy_in_place"])
"""Cross entropy of logits."""

FLOAT8 = frozenset(["ap.linear_float8", "ap.linear_float8_dynamic", "ap.experts_float8"])
"""Operations of bfloat16 tensors whose products are in float8."""


@lru_cache(maxsize=4096)
def packet(op: str) -> str:
    """``aten.add.Tensor`` -> ``aten.add``."""
    return ".".join(op.split(".")[:2])


def _linear(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    return 2.0 * prod(a[0]) * a[1][0]


def _linear_kn(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    return 2.0 * prod(a[0]) * a[1][1]


def _product(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    return 2.0 * prod(out[0]) * a[0][-1]


def _added_product(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    return 2.0 * prod(out[0]) * a[1][-1]


def _convolution(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    transposed = "transpose" in node.op or (
        packet(node.op) == "aten.convolution" and bool(argument(node, 6, "transposed", False))
    )
    return 2.0 * prod(a[0] if transposed else out[0]) * prod(a[1][1:])


def group_product(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> tuple[int, int, int, int] | None:
    """The matrix products of a convolution with groups: how many, and rows (pixels), columns and inner dimension of each; None of
    other operations."""
    if not packet(node.op).startswith("aten.conv") or len(a) < 2 or len(a[0]) != len(a[1]):
        return None
    groups = argument(node, 8 if packet(node.op) == "aten.convolution" else 6, "groups", 1)
    assert isinstance(groups, int)
    if groups == 1:
        return None
    result = out[0]
    return groups, result[0] * prod(result[2:]), result[1] // groups, a[0][1] // groups * prod(a[1][2:])


def _attention(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    """Two products, scores and values: ``2 b n s t (d + e)``; causal: half of them (FlashAttention-2, arXiv 2307.08691); with a
    window those pairs of positions that it allows.

    Chunks of a sequence (``ap.context_attention``) see all `parts` chunks; equal work for each, as with mirrored pairs of chunks.
    Tokens of a packed sequence see those of their sample alone, of `packed` tokens.
    """
    q, k, v = a[:3]
    if packed := packed_tokens(node):
        return float(prod(q[:-1]) * min(packed, k[-2]) * (q[-1] + v[-1]))
    keys = k[-2] * int(argument(node, 99, "parts", 1))  # type: ignore[arg-type]
    causal = argument(node, 5, "is_causal", False) is True
    window = argument(node, 99, "window")
    if window is not None:
        assert isinstance(window, tuple)
        left, right = window[0], 0 if causal else window[1]
        assert isinstance(left, int) and isinstance(right, int)
        return float(2 * prod(q[:-2]) * _pairs(q[-2], keys, left, right) * (q[-1] + v[-1]))
    return float(2 * prod(q[:-1]) * keys * (q[-1] + v[-1])) * (0.5 if causal else 1.0)


def packed_tokens(node: Node) -> int:
    """Tokens of a sample where causal attention is within the samples of a packed sequence (published fine-tuning); else 0."""
    return int(argument(node, 99, "packed", 0))  # type: ignore[arg-type]


def _pairs(queries: int, keys: int, left: int, right: int) -> int:
    """How many pairs (i, j) of a query and a key have ``-left <= j - i <= right``; -1 is without end."""

    def up_to(distance: int) -> int:
        """Pairs with ``j - i <= distance``: the sum over i of ``i + distance + 1``, between 0 and the number of keys."""

        def total(last: int) -> int:
            inside = max(0, min(last, keys))
            return inside * (inside + 1) // 2 + max(0, last - keys) * keys

        return total(queries + distance) - total(distance)

    return (queries * keys if right < 0 else up_to(right)) - (up_to(-left - 1) if left >= 0 else 0)


def _experts(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    """Every token through `top_k` experts: ``2 tokens k (F_up + F_down) H``."""
    return ExpertShapes.of(node.op, node.args, dict(node.kwargs), a).flops


FLOPS: Mapping[str, Callable[[Node, Sequence[Sizes], Sequence[Sizes]], float]] = {
    "aten.linear": _linear,
    "ap.linear_kn": _linear_kn,
    "ap.linear_float8": _linear,
    "ap.linear_float8_dynamic": _linear,
    "ap.moe_experts": _experts,
    "ap.experts": _experts,
    "ap.experts_float8": _experts,
    "aten.mm": _product,
    "aten.bmm": _product,
    "aten.matmul": _product,
    "aten.addmm": _added_product,
    "aten.baddbmm": _added_product,
    "aten.convolution": _convolution,
    "aten.conv1d": _convolution,
    "aten.conv2d": _convolution,
    "aten.conv3d": _convolution,
    "aten.conv_transpose1d": _convolution,
    "aten.conv_transpose2d": _convolution,
    "aten.conv_transpose3d": _convolution,
    "aten.scaled_dot_product_attention": _attention,
    "ap.attention": _attention,
    "ap.context_attention": _attention,
}
"""Forward FLOPs of matrix-product-like operations; others count none (as torch.utils.flop_counter). A multiply-add is two."""
