"""Complex products of pairs of real numbers (rotary embeddings as Meta's Llama and torchtitan write them), in real numbers."""

from __future__ import annotations

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, rewrite_nodes, size_args
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
