"""Attention in one kernel, and its named functions for a sharded sequence (ring attention) and for fewer key heads than ranks.

Arguments are (q, k, v, mask?, dropout_p, is_causal) and ``scale enable_gqa window``. Attention is *banded* where it is causal or
has a window: then a shard of the queries must know its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.rule import DerivedLine, NamedFunction, OperationCollective, argument
from autopar.operations.notation.spelling import OperationCall, function
from autopar.operations.operation import Operation, Sizes

ATTENTION, PUBLISHED_CONTEXT = "aten.scaled_dot_product_attention", "ap.context_attention"
DOCUMENTS = "ap.attention_documents"
"""Arguments are (q, k, v, query documents, key documents, query positions?, key positions?) and ``scale enable_gqa
window``."""
LENT = 6
"""One of so many queries of packed documents is lent to even out the work: of a long causal document over n ranks, the one at x n
has ``2 x`` of the mean work, and lends ``1 - 1/(2 x)`` of its queries where that is above it; the integral is 0.153."""
ATTENTION_WITH_WEIGHTS = "aten._scaled_dot_product_attention_math"
NARROW = 8
"""A window below this fraction of the sequence is assumed to reach no further than the neighbour's shard."""


def is_banded(node: Node) -> bool:
    """Return whether the keys that a query attends to depend on its position."""
    return bool(argument(node, 5, "is_causal", False)) or argument(node, 99, "window") is not None


def sees_all_keys(node: Node) -> bool:
    """Return whether every query sees all keys."""
    return node.op != DOCUMENTS and argument(node, 5, "is_causal", False) is not True and argument(node, 99, "window") is None


def is_grouped(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Return whether several query heads share one key head."""
    return bool(argument(node, 7, "enable_gqa", False)) and shapes[0][-3] != shapes[1][-3]


def attention_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Shards batch and heads; queries unless banded.

    With ``enable_gqa`` the query heads are ``(g r)``, r for each of the g key-value heads: one axis shards g, another one r.
    """
    query = "s!" if is_banded(node) else "s"
    mask = shapes[3] if len(shapes) > 3 else None
    if not is_grouped(node, shapes):
        extra = "" if mask is None else f", {'... ' if len(mask) > 2 else ''}{query} u!"
        return DerivedLine(f"... {query} d!, ... t! d!, ... t! e!{extra} -> ... {query} e!")
    extra = ""
    if mask is not None:
        heads = "(g r)" if len(mask) > 2 and mask[-3] != 1 else "1"
        extra = f", {'... ' if len(mask) > 3 else ''}{heads + ' ' if len(mask) > 2 else ''}{query} u!"
    text = f"... (g r) {query} d!, ... g t! d!, ... g t! e!{extra} -> ... (g r) {query} e!"
    return DerivedLine(text, minors=True)


def documents_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Shards batch, heads and queries: the document and the position of each query are operands, so that any shard of the
    sequence knows what it sees. All keys are on every rank, or pass by (`DOCUMENT_FUNCTIONS`)."""
    batch = shapes[0][0]
    ids = [f"{'b' if shape[0] == batch else '1'} {length}" for shape, length in zip(shapes[3:], ("s", "t!") * 2, strict=False)]
    heads, minors = ("(g r)", True) if is_grouped(node, shapes) else ("g", False)
    text = f"b {heads} s d!, b g t! d!, b g t! e!, {', '.join(ids)} -> b {heads} s e!"
    return DerivedLine(text, minors=minors)


def single_heads_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """Shards query heads, with all key heads on every rank."""
    extra = ""
    if len(shapes) > 3:
        heads = "h " if shapes[3][-3:-2] == shapes[0][-3:-2] else "1 "
        extra = f", {'... ' if len(shapes[3]) > 3 else ''}{heads if len(shapes[3]) > 2 else ''}s! u!"
    return DerivedLine(f"... h s! d!, ... g! t! d!, ... g! t! e!{extra} -> ... h s! e!")


def _alike(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Return whether what all named functions require holds: four dimensions, and no dropout."""
    return all(len(shape) == 4 for shape in shapes[:3]) and argument(node, 4, "dropout_p", 0.0) == 0.0


def _rows(node: Node, shapes: tuple[Shape, ...]) -> bool:
    return is_banded(node) and _alike(node, shapes)


def _heads(node: Node, shapes: tuple[Shape, ...]) -> bool:
    return is_grouped(node, shapes) and _alike(node, shapes)


def is_mirrored(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Return whether ring attention exchanges halves of shards, which balances causal attention (see
    `runtime.ops.attention.ring`)."""
    left, right = _window(node)
    causal = bool(argument(node, 5, "is_causal", False)) or right == 0
    rows = len(shapes) > 3 and len(shapes[3]) > 1 and shapes[3][-2] != 1
    length = shapes[0][-2]
    far = left < 0 or (isinstance(length, int) and 2 * left >= length)
    return causal and far and length == shapes[1][-2] and not rows


def _window(node: Node) -> tuple[int, int]:
    window = argument(node, 99, "window")
    return (-1, -1) if window is None else window  # type: ignore[return-value]


def ring_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """Keys and values of all ranks pass by, in forward and backward, and their gradients go back: n - 1 blocks each, as in an
    all-gather or a reduce-scatter. A narrow window needs the neighbours only. Mirrored, half of q, k, v and of the result is
    exchanged before; in the backward these and all gradients."""
    q, k, v = shapes[:3]
    dtype = node.outputs[0].dtype
    both = (*k[:-1], _sum(k[-1], v[-1]))
    left, right = _window(node)
    causal = bool(argument(node, 5, "is_causal", False))
    reach, length = [left, 0 if causal else right], k[-2]
    narrow = all(size >= 0 and isinstance(length, int) and NARROW * size <= length for size in reach)
    out: list[OperationCollective] = []
    for size in reach if narrow else (1,):
        if size > 0:
            group = 2 if narrow else 0
            out += [
                OperationCollective("all_gather", both, dtype, group=group, overlapped=True, operand=1),
                OperationCollective("all_gather", both, dtype, True, group, overlapped=True, operand=1),
                OperationCollective("reduce_scatter", both, dtype, True, group, overlapped=True, operand=1),
            ]
    if is_mirrored(node, shapes):
        for operand, shape in ((0, q), (1, k), (2, v), (0, node.outputs[0].shape)):
            half = (*shape[:-2], shape[-2] // 2 if isinstance(shape[-2], int) else shape[-2], shape[-1])
            out += [
                OperationCollective("all_to_all", half, dtype, operand=operand),
                OperationCollective("all_to_all", (2, *half), dtype, True, operand=operand),
            ]
    return tuple(out)


def _sum(a: object, b: object) -> int:
    assert isinstance(a, int) and isinstance(b, int)
    return a + b


def last_rank_imbalance(node: Node, shapes: tuple[Shape, ...], ranks: int) -> float:
    """The imbalance of a causal square of which each rank has a shard of rows: the last of n has ``(2 n - 1) / n**2`` of the
    area, which is n times that over the mean. Bands that are narrower than a shard are balanced."""
    left, right = _window(node)
    causal = bool(argument(node, 5, "is_causal", False)) or right == 0
    length = shapes[1][-2]
    wide = left < 0 or not isinstance(length, int) or left * ranks > length
    return 2 - 1 / ranks if causal and wide else 1.0


def ring_imbalance(node: Node, shapes: tuple[Shape, ...], ranks: int) -> float:
    """The imbalance of ring attention: 1 where halves are exchanged; else the last rank has most work."""
    length = shapes[0][-2]
    halves = isinstance(length, int) and length % (2 * ranks) == 0
    return 1.0 if halves and is_mirrored(node, shapes) else last_rank_imbalance(node, shapes, ranks)


def document_ring_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """Keys and values pass by, and their gradients go back; of short documents the neighbours' only. All ranks tell each other
    the documents and positions of their tokens. Queries are lent, and their results come back; in the backward these and both
    gradients."""
    (q, k, v, *ids), dtype = shapes, node.outputs[0].dtype
    both, tokens = (*k[:-1], _sum(k[-1], v[-1])), packed_tokens(node)
    lent = (*q[:-2], q[-2] // LENT if isinstance(q[-2], int) else q[-2], q[-1])
    group = 2 if tokens and isinstance(k[-2], int) and NARROW * tokens <= k[-2] else 0
    return (
        *(OperationCollective("all_gather", shape, "int64", operand=3 + index) for index, shape in enumerate(ids)),
        OperationCollective("all_gather", both, dtype, group=group, overlapped=True, operand=1),
        OperationCollective("all_gather", both, dtype, True, group, overlapped=True, operand=1),
        OperationCollective("reduce_scatter", both, dtype, True, group, overlapped=True, operand=1),
        OperationCollective("all_to_all", (2, *lent), dtype, operand=0),
        OperationCollective("all_to_all", (4, *lent), dtype, True, operand=0),
    )


def document_imbalance(node: Node, shapes: tuple[Shape, ...], ranks: int) -> float:
    """The imbalance of shards of packed documents of equal length: of a causal document over k shards the last has ``2 - 1/k``
    times the mean (see `last_rank_imbalance`); one that is no longer than a shard is balanced."""
    length = shapes[1][-2]
    if len(node.args) <= 5 or not isinstance(length, int):
        return 1.0
    shards = ranks * min(packed_tokens(node) or length, length) / length
    return 2 - 1 / shards if shards > 1 else 1.0


def context_attention_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-gathers keys and values of the whole sequence for every chunk, and reduce-scatters their gradients in the backward."""
    dtype, parts = node.outputs[0].dtype, int(dict(node.kwargs)["parts"])  # type: ignore[arg-type]
    both = (2, *shapes[1])
    return OperationCollective("all_gather", both, dtype, group=parts), OperationCollective(
        "reduce_scatter", both, dtype, True, parts
    )


def attention_flops(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    """Two products, scores and values: ``2 b n s t (d + e)``; causal: half of them (FlashAttention-2, arXiv 2307.08691); with a
    window those pairs of positions that it allows.

    Chunks of a sequence (``ap.context_attention``) see all `parts` chunks; equal work for each, as with mirrored pairs of chunks.
    Tokens of a packed sequence see those of their sample alone, of `packed` tokens.
    """
    q, k, v = a[:3]
    packed, window = packed_tokens(node), argument(node, 99, "window")
    if node.op == DOCUMENTS and isinstance(window, tuple) and isinstance(window[0], int):
        length = min(packed or k[-2], k[-2])
        return float(2 * prod(q[:-1]) * _pairs(length, length, window[0], 0) / length * (q[-1] + v[-1]))
    if packed or node.op == DOCUMENTS:
        shared = 1 if node.op != DOCUMENTS or len(node.args) > 5 else 2  # later keys of the document are hidden, or are not
        return float(shared * prod(q[:-1]) * min(packed or k[-2], k[-2]) * (q[-1] + v[-1]))
    keys = k[-2] * int(argument(node, 99, "parts", 1))  # type: ignore[arg-type]
    causal = argument(node, 5, "is_causal", False) is True
    if window is not None:
        assert isinstance(window, tuple)
        left, right = window[0], 0 if causal else window[1]
        assert isinstance(left, int) and isinstance(right, int)
        return float(2 * prod(q[:-2]) * _pairs(q[-2], keys, left, right) * (q[-1] + v[-1]))
    return float(2 * prod(q[:-1]) * keys * (q[-1] + v[-1])) * (0.5 if causal else 1.0)


def packed_tokens(node: Node) -> int:
    """Tokens of a sample where causal attention is within the samples of a packed sequence (published fine-tuning); else 0."""
    return int(argument(node, 99, "packed", 0))  # type: ignore[arg-type]


def with_packed_tokens(node: Node, tokens: float) -> Node:
    """Return attention within documents with what its documents have, where that is known; other operations as they are."""
    if node.op != DOCUMENTS or not tokens:
        return node
    return replace(node, kwargs=(*node.kwargs, ("packed", max(1, round(tokens)))))


def _pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Return the number of pairs (i, j) of a query and a key with ``-left <= j - i <= right``; -1 is without end."""

    def up_to(distance: int) -> int:
        """Pairs with ``j - i <= distance``: the sum over i of ``i + distance + 1``, between 0 and the number of keys."""

        def total(last: int) -> int:
            inside = max(0, min(last, keys))
            return inside * (inside + 1) // 2 + max(0, last - keys) * keys

        return total(queries + distance) - total(distance)

    return (queries * keys if right < 0 else up_to(right)) - (up_to(-left - 1) if left >= 0 else 0)


def _expression(call: OperationCall) -> str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    q, k, v = (given.pop(name) for name in names[:3])
    axes = given.pop("sharded_axes", None)
    defaults = {"attn_mask": "None", "dropout_p": "0.0", "is_causal": "False", "scale": "None", "enable_gqa": "False"}
    shown = [f"{name}={text}" for name, text in given.items() if defaults.get(name) != text]
    if axes is not None:
        return f"C.attention_dropout({', '.join([q, k, v, 'self.training', 'self.mesh', axes, *shown])})"
    return f"F.scaled_dot_product_attention({', '.join([q, k, v, *shown])})"


FUNCTIONS = (
    NamedFunction(
        "s", "ap.attention_ring", None, ring_collectives, also=("t",), applies=_alike, exclusive=True, imbalance=ring_imbalance,
        at=(0, -2),
    ),
    NamedFunction(
        "s", "ap.attention_rows", line=attention_rule, applies=_rows, exclusive=True, imbalance=last_rank_imbalance, at=(0, -2)
    ),
    NamedFunction("h", "ap.attention_heads", line=single_heads_rule, applies=_heads, exclusive=True, at=(0, -3)),
)  # fmt: skip
"""Ring attention (queries and keys sharded by sequence); queries sharded by sequence, with all keys on every rank; query heads
sharded where the key heads do not divide."""

DOCUMENT_FUNCTIONS = (
    NamedFunction(
        "s", "ap.attention_documents_ring", None, document_ring_collectives, also=("t",), exclusive=True, at=(0, -2)
    ),
)
"""Ring attention of packed documents."""

OPERATIONS = (
    Operation(
        ATTENTION, attention_rule, functions=FUNCTIONS, flops=attention_flops, attention=True,
        spelling=_expression,
    ),
    Operation("ap.attention", attention_rule, functions=FUNCTIONS, flops=attention_flops, attention=True,
              float32_sums=True, spelling=function("C")),
    Operation(DOCUMENTS, documents_rule, functions=DOCUMENT_FUNCTIONS, flops=attention_flops, attention=True,
              plain=NamedFunction("s", "", imbalance=document_imbalance), float32_sums=True, spelling=function("C")),
    # rows of the batch are consecutive chunks of a sequence, and each needs the keys and values of all
    Operation(
        PUBLISHED_CONTEXT, attention_rule, flops=attention_flops, attention=True, published=True,
        functions=(NamedFunction("batch0", "ap.context_attention_gathered", None, context_attention_collectives),),
    ),
)  # fmt: skip
