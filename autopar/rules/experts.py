"""A mixture of experts: ``ap.moe_experts(x, experts, weights, up, down, up_bias, down_bias, activation, layout, capacity)``."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Graph, Node
from autopar.rules.rule import Derived, NamedFunction
from autopar.rules.strategy import InnerCollective

_WIDE = {"halves": "(2 f+)", "interleaved": "(f+ 2)", "plain": "f+"}


def moe_experts(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """Tokens; or inside each expert, whose results are then summed; or experts, whose copies are summed.

    The bias behind the second product is added once by what is cut inside. Capacity needs all tokens of a group: it is an
    operation of its own, before.
    """
    _, _, _, _, _, up_bias, down_bias, _, layout, capacity = node.args
    words = str(layout).split()
    wide = _WIDE[next((word for word in words if word != "transposed"), "halves")]
    up, down = (f"e+ h! {wide}", "e+ f+ h!") if "transposed" in words else (f"e+ {wide} h!", "e+ h! f+")
    operands = ["... h!", "... k!", "... k!", up, down]
    operands += [f"e+ {wide}"] * (up_bias is not None) + ["e+ h!"] * (down_bias is not None)
    addends = (len(operands) - 1,) if down_bias is not None else ()
    return None if capacity is not None else Derived(f"{', '.join(operands)} -> ... h!", addends=addends)


def exchanged(node: Node, shapes: tuple[Shape, ...]) -> tuple[InnerCollective, ...]:
    """Copies of tokens go to their experts and come back, forward and backward. Counts and weights are small beside them."""
    copies = (shapes[1][-1], *shapes[0])
    dtype = node.outputs[0].dtype
    there, back = (InnerCollective("all_to_all", copies, dtype, backward, operand=0) for backward in (False, True))
    return there, there, back, back


def undivided(graph: Graph, parts: int) -> tuple[Node, int] | None:
    """A mixture whose experts cannot be dealt to so many ranks, and how many they are."""
    for block in graph.blocks:
        values = block.values()
        for node in block.nodes:
            if node.op == "ap.moe_experts":
                number = values[node.operands()[3]].shape[0]
                if isinstance(number, int) and number % parts:
                    return node, number
    return None


FUNCTIONS = (
    # all tokens are on every rank, which computes the copies of its own experts
    NamedFunction("e", "ap.moe_experts_owned"),
    # tokens are cut as well: copies travel
    NamedFunction("e", "ap.moe_experts_dispatched", None, exchanged, also=("...",)),
)
