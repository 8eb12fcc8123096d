"""Rewrites random numbers to one operation that every rank can draw for its own shard: ``ap.random(like, kind, a, b)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.capture.flat import Lookup, Rewritten, node_like, node_rewrite
from autopar.ir.graph import Arg, DType, Node, Ref

Draw = tuple[str, Arg, Arg]
"""Kind and parameters: ``uniform`` (from, to), ``normal`` (mean, deviation), ``exponential`` (rate), ``bernoulli`` (probability),
``integers`` (from, to, exclusive)."""


def _numbers(kind: str, *defaults: float) -> Callable[[Node], Draw]:
    def draw(node: Node) -> Draw:
        given = [arg for arg in node.args[1:] if isinstance(arg, (int, float))]
        a, b = (*given, *defaults[len(given) :])[:2]
        return kind, a, b

    return draw


_LIKE: dict[str, Callable[[Node], Draw]] = {
    "aten.rand_like": lambda node: ("uniform", 0.0, 1.0),
    "aten.randn_like": lambda node: ("normal", 0.0, 1.0),
    "aten.uniform": _numbers("uniform", 0.0, 1.0),
    "aten.normal_functional": _numbers("normal", 0.0, 1.0),
    "aten.exponential": _numbers("exponential", 1.0, 0.0),
    "aten.bernoulli.p": _numbers("bernoulli", 0.5, 0.0),
    "aten.randint_like": lambda node: ("integers", 0, node.args[1]),
    "aten.randint_like.low_dtype": lambda node: ("integers", node.args[1], node.args[2]),
}
"""Drawn for every element of the first operand."""

_OF_SIZE: dict[str, Callable[[Node], Draw]] = {
    "aten.rand": lambda node: ("uniform", 0.0, 1.0),
    "aten.randn": lambda node: ("normal", 0.0, 1.0),
    "aten.randint": lambda node: ("integers", 0, node.args[0]),
    "aten.randint.low": lambda node: ("integers", node.args[0], node.args[1]),
}
"""Drawn for a size."""

KNOWN = frozenset(
    (*_LIKE, *_OF_SIZE, "aten.bernoulli", "aten.native_dropout", "aten.dropout", "aten.scaled_dot_product_attention")
)
"""Random operations that shards can draw; `convert` refuses all others."""


@node_rewrite
def random_numbers(node: Node, graph: Lookup) -> Rewritten | None:
    """The graph with ``ap.random`` in place of every random operation but dropout."""
    if node.op in _LIKE:
        return _drawn(node, Ref(node.operands()[0]), _LIKE[node.op](node))
    result = node.outputs[0]
    if node.op in _OF_SIZE:
        size = next(arg for arg in node.args if isinstance(arg, tuple))
        empty = node_like(node, "aten.empty", (size,), f"{node.name}_empty", result.shape, flows=False)
        empty = replace(empty, kwargs=(("dtype", DType(result.dtype)),))
        return (empty, _drawn(node, Ref(empty.name), _OF_SIZE[node.op](node))), {}
    if node.op == "aten.bernoulli":
        (name,) = node.operands()
        chances = Ref(name)
        uniform = node_like(node, "ap.random", (chances, "uniform", 0.0, 1.0), f"{node.name}_uniform", result.shape, flows=False)
        hit = node_like(node, "aten.lt.Tensor", (Ref(uniform.name), chances), f"{node.name}_hit", result.shape, "bool", False)
        return (uniform, hit, replace(node, op="aten.to.dtype", args=(Ref(hit.name), DType(result.dtype)), kwargs=())), {}
    return None


def _drawn(node: Node, operand: Ref, drawn: Draw) -> Node:
    return replace(
        node, op="ap.random", args=(operand, *drawn), kwargs=(), outputs=(replace(node.outputs[0], differentiable=False),)
    )
