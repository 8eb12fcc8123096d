"""Backwards of custom ``autograd.Function``s that are not linear in the gradient are refused.

A derivative that does not read the gradient g leaves three things open: what is added to g (``g + c``), steps, whose derivative
torch has as a constant (``sign(g)``), and values that have none (``g > 0``). They stand in the program of b(g) itself: beside its
derivative, its operations say where it has steps, and which sums are zero because all of their terms are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.capture.flat import FlatGraph, drop_dead, rename_operands
from autopar.capture.tracing.custom.functions import ADDS, HIDDEN, MARK, NONLINEAR, SEED, refusal
from autopar.ir.graph import Arg, Node, Ref, Value
from autopar.operations.factories import FULL, SCALAR
from autopar.operations.views import DETACH


def refuse_nonlinear(flat: FlatGraph) -> FlatGraph:
    """Return the graph without what is in it for this. CaptureError for the first function whose backward is not linear in the
    gradient."""
    plain = _without_marks(flat)
    for node in drop_dead(plain).nodes:
        if node.op == SEED:
            raise refusal(str(node.args[1]), f"{NONLINEAR} (it clips or scales by it)")
    walk = _Walk()
    for node in drop_dead(flat).nodes:
        walk.step(node)
    return plain


def refuse_hidden(graph: fx.Graph, line: str) -> None:
    """CaptureError for a tensor at the line of a custom function that export has no values of: torch made it for a derivative."""
    names = [str(node.args[1]) for node in graph.nodes if str(node.target).startswith(SEED)]
    for name in (name for name in names if name.rpartition(" ")[0].endswith(line)):
        raise refusal(name, HIDDEN)


def _without_marks(flat: FlatGraph) -> FlatGraph:
    """The graph without marks, and without detaches of what is made of detached tensors alone."""
    values, cut = flat.values(), set[str]()
    nodes, names = list[Node](), dict[str, str]()
    for node in (rename_operands(node, names) for node in flat.nodes):
        operands = node.operands()
        if node.op == MARK or (node.op == DETACH and operands[0] in cut):
            names[node.name] = operands[0]
            continue
        floating = {name for name in operands if _is_floating(values[name])}
        if node.op == DETACH or (floating and floating <= cut):
            cut.update(value.name for value in node.outputs)
        nodes.append(node)
    return replace(flat, nodes=tuple(nodes))


def _is_floating(value: Value) -> bool:
    return value.dtype.lstrip("b").startswith(("float", "complex"))


class _Walk:
    """The values that come from a gradient, with the names of their functions, and those that are zero."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.zeros: set[str] = set()
        self.floating: set[str] = set()

    def step(self, node: Node) -> None:
        outputs = {value.name for value in node.outputs}
        self.floating |= {value.name for value in node.outputs if _is_floating(value)}
        name = next((self.names[operand] for operand in node.operands() if operand in self.names), "")
        if node.op == SEED:
            self.names.update(dict.fromkeys(outputs, str(node.args[1])))
        elif name and node.op != MARK:
            self.check(node, name)
            self.names.update(dict.fromkeys(outputs, name))
        elif gives_zero(node, self.zeros):
            self.zeros |= outputs

    def check(self, node: Node, name: str) -> None:
        """CaptureError for an operation on a gradient that is not linear."""
        if is_step(node) or any(operand in self.names and operand not in self.floating for operand in node.operands()):
            raise refusal(name, f"{NONLINEAR} (aten.{short_name(node)} of it)")
        product = factors(node)
        if not all(map(self.vanishes, terms(node))) or (product and not any(map(self.vanishes, product))):
            raise refusal(name, ADDS)

    def vanishes(self, arg: Arg) -> bool:
        """Return whether an argument is zero where the gradient is."""
        if isinstance(arg, (tuple, list)):
            return all(map(self.vanishes, arg))
        if isinstance(arg, Ref):
            return arg.name in self.names or arg.name in self.zeros
        return arg is None or arg == 0


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
