"""Operations for the question whether a function is linear in a value, beside its derivative: steps, whose derivative torch has
as a constant, and sums, which are zero where all of their terms are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Arg, Node, Ref
from autopar.operations.factories import FULL, SCALAR

_ROUND = ("round", "floor", "ceil", "trunc", "fix", "frac", "fmod", "remainder", "floor_divide")
_DRAWS = ("bernoulli", "normal", "normal_functional", "uniform", "exponential", "random")
_STEPS = frozenset((*_ROUND, *_DRAWS, "sign", "sgn", "heaviside", "copysign"))
_PRODUCTS = ("addmm", "addmv", "addbmm", "baddbmm", "addr", "addcmul", "addcdiv")
_LINEAR = ("linear", "convolution", "conv1d", "conv2d", "conv3d")
_PAIRS = ("add", "sub", "rsub", "lerp", "complex", "polar")
_INTO = ("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter")
_AT_INDEX = ("scatter", "scatter_add", "scatter_reduce", "index_copy", "index_add", "index_fill", "index_reduce")
_AT_MASK = ("masked_fill", "masked_scatter", "constant_pad_nd", "index_put", "put")
_TERMS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys((*_PAIRS, *_INTO), (0, 1)),
    **dict.fromkeys(_AT_INDEX, (0, 3)),
    **dict.fromkeys(_AT_MASK, (0, 2)),
    **dict.fromkeys(("cat", "stack", *_PRODUCTS), (0,)),
    **dict.fromkeys(("copy", "fill"), (1,)),
    **dict.fromkeys(_LINEAR, (2,)),
    "where": (1, 2),
    "pad": (0, 3),
}
_UNSET = ("empty", "empty_like", "new_empty", "empty_strided")  # what is left of it means nothing in eager either
_ZEROS = frozenset(("zeros", "zeros_like", "new_zeros", "zero", *_UNSET))
_FILLS = frozenset(("full", "full_like", "new_full", "fill"))
_VIEWS = ("view", "_unsafe_view", "reshape", "expand", "slice", "select", "permute", "transpose", "t", "unsqueeze", "squeeze")
_PICKS = ("repeat", "index", "index_select", "gather", "flip", "triu", "tril")
_COPIES = ("detach", "clone", "alias", "_to_copy", "lift_fresh_copy", "contiguous")
_KEEPS_ZERO = frozenset((*_VIEWS, *_COPIES, *_PICKS, "neg", "abs", "div", "sum", "mean"))
_MULTIPLIES = frozenset(("mul", "mm", "bmm", "mv", "dot", "matmul"))


def short_name(node: Node) -> str:
    """``add`` of ``aten.add.Tensor``."""
    return node.op.partition(".")[2].partition(".")[0]


def is_step(node: Node) -> bool:
    """Return whether an operation is constant almost everywhere, or has the derivative of another function."""
    rounds = any(key == "rounding_mode" and value is not None for key, value in node.kwargs)
    return rounds or short_name(node) in _STEPS


def terms(node: Node) -> Sequence[Arg]:
    """Return the arguments of which a sum, or a tensor that is put together, is made."""
    return [node.args[place] for place in _TERMS.get(short_name(node), ()) if place < len(node.args)]


def factors(node: Node) -> Sequence[Arg]:
    """Return the factors of the product that is one of the terms."""
    first = 1 if short_name(node) in _PRODUCTS else 0
    return node.args[first : first + 2] if first or short_name(node) in _LINEAR else ()


def gives_zero(node: Node, zeros: set[str]) -> bool:
    """Return whether an operation gives zeros, where these values are."""

    def is_zero(arg: Arg) -> bool:
        if isinstance(arg, (tuple, list)):
            return all(map(is_zero, arg))
        return arg.name in zeros if isinstance(arg, Ref) else arg is None or arg == 0

    name = short_name(node)
    if node.op in (FULL, SCALAR) or name in _FILLS:
        return node.args[-1] == 0
    if name in _MULTIPLIES:
        return any(map(is_zero, node.args[:2]))
    if name in _TERMS:
        product = factors(node)
        return all(map(is_zero, terms(node))) and (not product or any(map(is_zero, product)))
    return name in _ZEROS or (name in _KEEPS_ZERO and is_zero(node.args[0]))
