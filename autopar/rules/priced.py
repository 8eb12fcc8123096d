"""Operations of other software's runs that are priced but never run: no capture makes them, no program has them.

`autopar.validate` puts them into graphs of published runs. They are not in `default_registry`, so that no plan can have them;
`tests/validate` proves their lines by execution of a plain function.
"""

from __future__ import annotations

from types import MappingProxyType

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.rules.aten import FUNCTIONS, LINES
from autopar.rules.attention import attention
from autopar.rules.registry import Registry, default_registry
from autopar.rules.rule import Derived, NamedFunction, Rule, argument
from autopar.rules.strategy import InnerCollective


def context_attention_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[InnerCollective, ...]:
    """Keys and values of the whole sequence come to every chunk, and the sums of their gradients go back."""
    dtype, parts = node.outputs[0].dtype, int(dict(node.kwargs)["parts"])  # type: ignore[arg-type]
    both = (2, *shapes[1])
    return InnerCollective("all_gather", both, dtype, group=parts), InnerCollective("reduce_scatter", both, dtype, True, parts)


def experts(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``ap.experts(x, scores, up, down, top_k, ep=...)``: over tokens; or inside each expert, whose results are then summed.

    ``up`` is [E, F, H] or, with gates, [E, 2 F, H]; ``down`` is [E, H, F].
    """
    inner = "(2 f+)" if shapes[2][1] != shapes[3][2] else "f+"
    return Derived(f"... h!, ... e!, e! {inner} h!, e! h! f+ -> ... h!")


def experts_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[InnerCollective, ...]:
    """Tokens go to their experts and come back, forward and backward: four exchanges of every token `top_k` times.

    With ``once`` a token goes to each node once (DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2).
    """
    ep = int(argument(node, 99, "ep", 1))  # type: ignore[arg-type]
    if ep == 1:
        return ()
    top_k = int(node.args[4])  # type: ignore[arg-type]
    copies = top_k if argument(node, 99, "once", False) else 1
    there, back = (
        InnerCollective("all_to_all", (top_k, *shapes[0]), node.outputs[0].dtype, backward, ep, tokens=True, copies=copies)
        for backward in (False, True)
    )
    return there, there, back, back


def priced_table() -> dict[str, Rule]:
    """The rules. Context attention: rows of the batch are consecutive chunks of a sequence, and need the others' keys and values.
    Experts: each rank holds some, tokens go there and come back."""
    gathered = NamedFunction("batch0", "ap.context_attention_gathered", None, context_attention_collectives)
    dispatched = NamedFunction("batch0", "ap.experts_dispatched", None, experts_collectives)
    return {
        "ap.linear_float8": Rule(LINES["aten.linear"]),
        "ap.cross_entropy_in_place": Rule(LINES["ap.cross_entropy_sum"], functions=(FUNCTIONS["ap.cross_entropy_sum"],)),
        "ap.context_attention": Rule(attention, functions=(gathered,)),
        "ap.experts": Rule(experts, functions=(dispatched,), addends=False),
        "ap.experts_float8": Rule(experts, functions=(dispatched,), addends=False),
    }


def priced_registry() -> Registry:
    """The rules of this package, and those of operations that are only priced."""
    return Registry(MappingProxyType({**default_registry().rules, **priced_table()}))
