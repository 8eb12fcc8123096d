"""Attention: which of its dimensions one axis may cut, and the functions that a cut sequence or too few key heads take.

Arguments are (q, k, v, mask?, dropout_p, is_causal) and ``scale enable_gqa window``. Attention is *banded* where it is causal or
has a window: then a part of the queries must know which part it is.
"""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.rules.rule import Derived, NamedFunction, argument
from autopar.rules.strategy import InnerCollective

OPERATIONS = ("aten.scaled_dot_product_attention", "ap.attention")
NARROW = 8
"""A window below this part of the sequence is taken to reach no further than the neighbour's part."""


def is_banded(node: Node) -> bool:
    """Whether what a query sees depends on its position."""
    return bool(argument(node, 5, "is_causal", False)) or argument(node, 99, "window") is not None


def is_grouped(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Whether several query heads read one key head."""
    return bool(argument(node, 7, "enable_gqa", False)) and shapes[0][-3] != shapes[1][-3]


def attention(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """Heads, batch; queries unless banded.

    With ``enable_gqa`` the query heads are ``(g r)``, r for each of the g key-value heads: one axis cuts g, another may cut r.
    """
    query = "s!" if is_banded(node) else "s"
    mask = shapes[3] if len(shapes) > 3 else None
    if not is_grouped(node, shapes):
        extra = "" if mask is None else f", {'... ' if len(mask) > 2 else ''}{query} u!"
        return Derived(f"... {query} d!, ... t! d!, ... t! e!{extra} -> ... {query} e!")
    extra = ""
    if mask is not None:
        heads = "(g r)" if len(mask) > 2 and mask[-3] != 1 else "1"
        extra = f", {'... ' if len(mask) > 3 else ''}{heads + ' ' if len(mask) > 2 else ''}{query} u!"
    text = f"... (g r) {query} d!, ... g t! d!, ... g t! e!{extra} -> ... (g r) {query} e!"
    return Derived(text, minors=True)


def single_heads(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """Query heads one by one, all key heads whole."""
    extra = ""
    if len(shapes) > 3:
        heads = "h " if shapes[3][-3:-2] == shapes[0][-3:-2] else "1 "
        extra = f", {'... ' if len(shapes[3]) > 3 else ''}{heads if len(shapes[3]) > 2 else ''}s! u!"
    return Derived(f"... h s! d!, ... g! t! d!, ... g! t! e!{extra} -> ... h s! e!")


def _alike(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """What every function takes: four dimensions, nothing dropped out."""
    return all(len(shape) == 4 for shape in shapes[:3]) and argument(node, 4, "dropout_p", 0.0) == 0.0


def _rows(node: Node, shapes: tuple[Shape, ...]) -> bool:
    return is_banded(node) and _alike(node, shapes)


def _heads(node: Node, shapes: tuple[Shape, ...]) -> bool:
    return is_grouped(node, shapes) and _alike(node, shapes)


def is_mirrored(node: Node, shapes: tuple[Shape, ...]) -> bool:
    """Whether the ring exchanges halves of parts, so that causal attention is even (see `runtime.attention_ring`)."""
    left, right = _window(node)
    causal = bool(argument(node, 5, "is_causal", False)) or right == 0
    rows = len(shapes) > 3 and len(shapes[3]) > 1 and shapes[3][-2] != 1
    length = shapes[0][-2]
    far = left < 0 or (isinstance(length, int) and 2 * left >= length)
    return causal and far and length == shapes[1][-2] and not rows


def _window(node: Node) -> tuple[int, int]:
    window = argument(node, 99, "window")
    return (-1, -1) if window is None else window  # type: ignore[return-value]


def ring_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[InnerCollective, ...]:
    """Keys and values of all others come by, in the backward once more, and their gradients go back: n - 1 blocks each, what a
    gather or a scatter moves. A narrow window takes those of the neighbours only. Mirrored: half of q, k, v and of the result is
    exchanged, in the backward these and all gradients."""
    q, k, v = shapes[:3]
    dtype = node.outputs[0].dtype
    both = (*k[:-1], _sum(k[-1], v[-1]))
    left, right = _window(node)
    causal = bool(argument(node, 5, "is_causal", False))
    reach, length = [left, 0 if causal else right], k[-2]
    narrow = all(size >= 0 and isinstance(length, int) and NARROW * size <= length for size in reach)
    out: list[InnerCollective] = []
    for size in reach if narrow else (1,):
        if size > 0:
            group = 2 if narrow else 0
            out += [
                InnerCollective("all_gather", both, dtype, group=group, behind=True, operand=1),
                InnerCollective("all_gather", both, dtype, True, group, behind=True, operand=1),
                InnerCollective("reduce_scatter", both, dtype, True, group, behind=True, operand=1),
            ]
    if is_mirrored(node, shapes):
        for operand, shape in ((0, q), (1, k), (2, v), (0, node.outputs[0].shape)):
            half = (*shape[:-2], _half(shape[-2]), shape[-1])
            out += [
                InnerCollective("all_to_all", half, dtype, operand=operand),
                InnerCollective("all_to_all", (2, *half), dtype, True, operand=operand),
            ]
    return tuple(out)


def _sum(a: object, b: object) -> int:
    assert isinstance(a, int) and isinstance(b, int)
    return a + b


def _half(length: object) -> int:
    assert isinstance(length, int)
    return length // 2


def last_rows(node: Node, shapes: tuple[Shape, ...], ranks: int) -> float:
    """The last of n parts of a causal square holds ``(2 n - 1) / n**2`` of its area, n times that over the mean; bands that are
    narrower than a part are even."""
    left, right = _window(node)
    causal = bool(argument(node, 5, "is_causal", False)) or right == 0
    length = shapes[1][-2]
    wide = left < 0 or not isinstance(length, int) or left * ranks > length
    return 2 - 1 / ranks if causal and wide else 1.0


def ring_rows(node: Node, shapes: tuple[Shape, ...], ranks: int) -> float:
    """Mirrored parts are even; where halves cannot be exchanged the last rank has most."""
    length = shapes[0][-2]
    halves = isinstance(length, int) and length % (2 * ranks) == 0
    return 1.0 if halves and is_mirrored(node, shapes) else last_rows(node, shapes, ranks)


FUNCTIONS = (
    NamedFunction("s", "ap.attention_ring", None, ring_collectives, also=("t",), applies=_alike, alone=True, uneven=ring_rows),
    NamedFunction("s", "ap.attention_rows", line=attention, applies=_rows, alone=True, uneven=last_rows),
    NamedFunction("h", "ap.attention_heads", line=single_heads, applies=_heads, alone=True),
)
"""The sequence of queries and of keys, by passing keys and values round; queries alone, with the keys that they see; query heads
where their keys' heads do not divide."""
