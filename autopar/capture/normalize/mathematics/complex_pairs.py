"""Complex products of pairs of real numbers (rotary embeddings as Meta's Llama and torchtitan write them), in real numbers; and
writes into complex tensors, whose operations have no gradient in torch: into the pairs of real numbers that they are."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, node_rewrite, rewrite_nodes, size_args
from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node, Ref
from autopar.operations.views import COMPLEX_VIEW, REAL_VIEW, RESHAPE, SLICE


def real_products(flat: FlatGraph) -> FlatGraph:
    """``view_as_real(view_as_complex(x) * factor)`` becomes products of real and imaginary parts, for which inductor writes
    kernels, and of which `written_out` knows what they are."""
    graph = Lookup(flat)
    parts: dict[tuple[str, str, bool], tuple[Ref, ...]] = {}
    """The real and imaginary part of a factor, by factor, module (equal layers stay equal) and whether gradients end."""

    def step(node: Node) -> Rewritten | None:
        product = graph.producers.get(node.operands()[0]) if node.op == REAL_VIEW else None
        if product is None or product.op != "aten.mul.Tensor" or len(product.operands()) != 2 or graph.uses[product.name] > 1:
            return None
        found = next(filter(None, (_pairs(product, place, graph) for place in (0, 1))), None)
        if found is None:
            return None
        pairs, factor = found
        new: list[Node] = []

        def add(name: str, op: str, shape: Shape, *args: Arg, of: str = pairs) -> Ref:
            flows = graph.values[of].differentiable
            new.append(node_like(product, op, args, f"{product.name}_{name}", shape, node.outputs[0].dtype, flows))
            return Ref(new[-1].name)

        key, (*lead, count, _) = (factor, product.module, product.no_grad), graph.values[pairs].shape
        if key not in parts:  # not view_as_real, which takes no conjugate
            shape = graph.values[factor].shape
            parts[key] = tuple(add(f"factor_{part}", f"aten.{part}", shape, Ref(factor), of=factor) for part in ("real", "imag"))
        cos, sin = parts[key]
        merged, half = (*lead, 2 * int(count)), (*lead, count)
        x = add("whole", RESHAPE, merged, Ref(pairs), size_args(merged))
        first, second = (add(f"half_{at}", SLICE, half, x, len(lead), at, merged[-1], 2) for at in (0, 1))
        terms = ((first, cos), (second, sin), (second, cos), (first, sin))
        one, two, three, four = (add(f"term_{at}", "aten.mul.Tensor", half, *term) for at, term in enumerate(terms))
        results = add("real", "aten.sub.Tensor", half, one, two), add("imaginary", "aten.add.Tensor", half, three, four)
        return (*new, node_like(node, "aten.stack", (results, -1), node.name, node.outputs[0].shape)), {}

    return rewrite_nodes(flat, step)


def _pairs(product: Node, place: int, graph: Lookup) -> tuple[str, str] | None:
    """The pairs that an operand of a complex product is a view of, and the other operand, which broadcasts to it."""
    operands = product.operands()
    view = graph.producers.get(operands[place])
    if view is None or view.op != COMPLEX_VIEW or graph.uses[view.name] > 1 or view.no_grad != product.no_grad:
        return None
    x, factor = view.outputs[0], graph.values[operands[1 - place]]
    if x.shape != product.outputs[0].shape or x.dtype != factor.dtype or not x.shape or not isinstance(x.shape[-1], int):
        return None
    return view.operands()[0], factor.name


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
