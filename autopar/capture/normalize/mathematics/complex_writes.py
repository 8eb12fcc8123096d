"""Writes into complex tensors, whose operations have no gradient in torch: into the pairs of real numbers that they are."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.flat import Lookup, Rewritten, node_like, node_rewrite
from autopar.ir.graph import Arg, Node, Ref
from autopar.operations.views import COMPLEX_VIEW, REAL_VIEW

_REAL = {"complex64": "float32", "complex128": "float64"}
_FURTHER = {"aten.slice_scatter": ("dim", "start", "end", "step"), "aten.select_scatter": ("dim", "index")}
"""The operations that write, with their arguments beside the tensors."""


@node_rewrite
def complex_writes(node: Node, graph: Lookup) -> Rewritten | None:
    """``select_scatter(x, part, 1, 0)`` is ``view_as_complex(select_scatter(view_as_real(x), view_as_real(part), 1, 0))``."""
    result = node.outputs[0]
    if result.dtype not in _REAL or node.op not in (*_FURTHER, "aten.zero"):
        return None
    if node.op == "aten.zero":
        return (replace(node, op="aten.zeros_like"),), {}
    new: list[Node] = []

    def add(op: str, name: str, *args: Arg, of: str, dtype: str, pair: tuple[int, ...] = ()) -> Ref:
        value = graph.values[of]
        new.append(node_like(node, op, args, f"{node.name}_{name}", (*value.shape, *pair), dtype, value.differentiable))
        return Ref(new[-1].name)

    def pairs(of: str, name: str) -> Ref:
        dtype = graph.values[of].dtype
        plain = add("aten.resolve_conj", f"{name}_plain", Ref(of), of=of, dtype=dtype)  # a conjugate has no view
        return add(REAL_VIEW, f"{name}_pairs", plain, of=of, dtype=_REAL[dtype], pair=(2,))

    base, part = (pairs(name, word) for name, word in zip(node.operands(), ("base", "part"), strict=True))
    written = add(node.op, "pairs", base, part, *_further(node), of=node.name, dtype=_REAL[result.dtype], pair=(2,))
    return (*new, replace(node, op=COMPLEX_VIEW, args=(written,), kwargs=())), {}


def _further(node: Node) -> tuple[Arg, ...]:
    """The arguments after the operands, with the dimension from the front."""
    given = {"dim": 0, "start": None, "end": None, "step": 1, **dict(node.kwargs)}
    given.update(zip(_FURTHER[node.op], node.args[2:], strict=False))
    dim = given["dim"]
    assert isinstance(dim, int)
    return (dim % len(node.outputs[0].shape), *(given[name] for name in _FURTHER[node.op][1:]))
