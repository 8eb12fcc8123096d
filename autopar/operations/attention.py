"""The rule of attention, and the named functions for a sharded sequence (ring attention) and for fewer key heads than ranks.

Arguments are (q, k, v, mask?, dropout_p, is_causal) and ``scale enable_gqa window``. Attention is *banded* where it is causal or
has a window: then a shard of the queries must know its position.
"""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.rule import DerivedLine, NamedFunction, OperationCollective, argument

OPERATIONS = ("aten.scaled_dot_product_attention", "ap.attention")
NARROW = 8
"""A window below this fraction of the sequence is assumed to reach no further than the neighbour's shard."""


def is_banded(node: Node) -> bool:
    """Whether the keys that a query attends to depend on its position."""
    return bool(argument(node, 5, "is_causal", False)) or argument(node, 99, "window") is not None


def is_grouped(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Whether several query heads share one key head."""
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


def single_heads_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """Shards query heads, with all key heads on every rank."""
    extra = ""
    if len(shapes) > 3:
        heads = "h " if shapes[3][-3:-2] == shapes[0][-3:-2] else "1 "
        extra = f", {'... ' if len(shapes[3]) > 3 else ''}{heads if len(shapes[3]) > 2 else ''}s! u!"
    return DerivedLine(f"... h s! d!, ... g! t! d!, ... g! t! e!{extra} -> ... h s! e!")


def _alike(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """What all named functions require: four dimensions, and no dropout."""
    return all(len(shape) == 4 for shape in shapes[:3]) and argument(node, 4, "dropout_p", 0.0) == 0.0


def _rows(node: Node, shapes: tuple[Shape, ...]) -> bool:
    return is_banded(node) and _alike(node, shapes)


def _heads(node: Node, shapes: tuple[Shape, ...]) -> bool:
    return is_grouped(node, shapes) and _alike(node, shapes)


def is_mirrored(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Whether ring attention exchanges halves of shards, which balances causal attention (see `runtime.ops.ring_attention`)."""
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
            half = (*shape[:-2], _half(shape[-2]), shape[-1])
            out += [
                OperationCollective("all_to_all", half, dtype, operand=operand),
                OperationCollective("all_to_all", (2, *half), dtype, True, operand=operand),
            ]
    return tuple(out)


def _sum(a: object, b: object) -> int:
    assert isinstance(a, int) and isinstance(b, int)
    return a + b


def _half(length: object) -> int:
    assert isinstance(length, int)
    return length // 2


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


FUNCTIONS = (
    NamedFunction(
        "s", "ap.attention_ring", None, ring_collectives, also=("t",), applies=_alike, exclusive=True, imbalance=ring_imbalance
    ),
    NamedFunction("s", "ap.attention_rows", line=attention_rule, applies=_rows, exclusive=True, imbalance=last_rank_imbalance),
    NamedFunction("h", "ap.attention_heads", line=single_heads_rule, applies=_heads, exclusive=True),
)
"""Ring attention (queries and keys sharded by sequence); queries sharded by sequence, with all keys on every rank; query heads
sharded where the key heads do not divide."""
