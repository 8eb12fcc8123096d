"""The rule of a mixture of experts:
``ap.moe_experts(x, experts, weights, up, down, up_bias, down_bias, activation, layout, capacity)``."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Graph, Node
from autopar.operations.notation.rule import DerivedLine, NamedFunction, OperationCollective

_WIDE = {"halves": "(2 f+)", "interleaved": "(f+ 2)", "plain": "f+"}


def moe_experts_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """Shards tokens; or the inner dimension of every expert (tensor parallel, summed); or experts (expert parallel, summed).

    The bias after the second product is an addend where the inner dimension is sharded. A capacity needs all tokens of a group:
    normalization makes it an operation of its own.
    """
    _, _, _, _, _, up_bias, down_bias, _, layout, capacity = node.args
    words = str(layout).split()
    wide = _WIDE[next((word for word in words if word != "transposed"), "halves")]
    up, down = (f"e+ h! {wide}", "e+ f+ h!") if "transposed" in words else (f"e+ {wide} h!", "e+ h! f+")
    operands = ["... h!", "... k!", "... k!", up, down]
    operands += [f"e+ {wide}"] * (up_bias is not None) + ["e+ h!"] * (down_bias is not None)
    addends = (len(operands) - 1,) if down_bias is not None else ()
    return None if capacity is not None else DerivedLine(f"{', '.join(operands)} -> ... h!", addends=addends)


def dispatch_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """Dispatch and combine: all-to-alls of the copies of tokens, forward and backward. Counts and weights are negligible."""
    copies = (shapes[1][-1], *shapes[0])
    dtype = node.outputs[0].dtype
    there, back = (OperationCollective("all_to_all", copies, dtype, backward, operand=0) for backward in (False, True))
    return there, there, back, back


def indivisible_experts(graph: Graph, parts: int) -> tuple[Node, int] | None:
    """The first mixture whose number of experts does not divide over `parts` ranks, with that number."""
    for block in graph.blocks:
        values = block.values()
        for node in block.nodes:
            if node.op == "ap.moe_experts":
                number = values[node.operands()[3]].shape[0]
                if isinstance(number, int) and number % parts:
                    return node, number
    return None


FUNCTIONS = (
    # tokens are replicated: each rank computes the copies that go to its own experts
    NamedFunction("e", "ap.moe_experts_owned"),
    # tokens are sharded too: their copies are exchanged
    NamedFunction("e", "ap.moe_experts_dispatched", None, dispatch_collectives, also=("...",)),
)
