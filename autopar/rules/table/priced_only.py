"""Rules of operations in published runs of other software, which are priced but never run: no capture or program has them.

`autopar.recipes.graphs` puts them into graphs of decoders as other software writes them. They are not in `default_registry`, so
no plan contains them; `tests/validate` proves their lines by executing a plain function.
"""

from __future__ import annotations

from types import MappingProxyType

from autopar.ir.dims import Shape
from autopar.ir.graph import Block, Node, Parameter
from autopar.rules.registry import Registry, default_registry
from autopar.rules.rule import DerivedLine, NamedFunction, Rule, argument
from autopar.rules.strategy import OperationCollective
from autopar.rules.table.aten import FUNCTIONS, LINES
from autopar.rules.table.attention import attention_rule


def context_attention_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-gathers keys and values of the whole sequence for every chunk, and reduce-scatters their gradients in the backward."""
    dtype, parts = node.outputs[0].dtype, int(dict(node.kwargs)["parts"])  # type: ignore[arg-type]
    both = (2, *shapes[1])
    return OperationCollective("all_gather", both, dtype, group=parts), OperationCollective(
        "reduce_scatter", both, dtype, True, parts
    )


def experts_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``ap.experts(x, scores, up, down, top_k, ep=...)``: shards tokens; or the inner dimension of every expert (summed).

    ``up`` is [E, F, H] or, with gates, [E, 2 F, H]; ``down`` is [E, H, F]. It is not ``ap.moe_experts``: the router's scores are
    an operand, and expert parallelism is an argument (a group within the data axis, as in published runs) and no factor.
    """
    inner = "(2 f+)" if shapes[2][1] != shapes[3][2] else "f+"
    return DerivedLine(f"... h!, ... e!, e! {inner} h!, e! h! f+ -> ... h!")


def expert_degrees(block: Block) -> dict[Parameter, int]:
    """By expert weight: the number of neighbouring data ranks over which its dimension 0 is sharded outside of the mesh, if there
    are several."""
    experts = [node for node in block.nodes if node.op in ("ap.experts", "ap.experts_float8")]
    degrees = {name: int(argument(node, 99, "ep", 1)) for node in experts for name in node.operands()[2:4]}  # type: ignore[arg-type]
    return {each: degrees[each.value.name] for each in block.parameters if degrees.get(each.value.name, 1) > 1}


def experts_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """Dispatch and combine, forward and backward: four all-to-alls of `top_k` copies of every token.

    With ``once`` a token is sent to each node once (DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2). Where an axis cuts
    inside the experts, its ranks have dispatched different tokens and need each other's: they gather the copies, and
    reduce-scatter the results (Megatron-Core's token_dispatcher.py, over the expert tensor axis).
    """
    ep = int(argument(node, 99, "ep", 1))  # type: ignore[arg-type]
    if ep == 1:
        return ()
    top_k = int(node.args[4])  # type: ignore[arg-type]
    copies = top_k if argument(node, 99, "once", False) else 1
    there, back = (
        OperationCollective("all_to_all", (top_k, *shapes[0]), node.outputs[0].dtype, backward, ep, tokens=True, copies=copies)
        for backward in (False, True)
    )
    dtype = node.outputs[0].dtype
    among = [
        OperationCollective(kind, (top_k, *shapes[0]), dtype, backward, factor="f")
        for backward in (False, True)
        for kind in ("all_gather", "reduce_scatter")
    ]
    return there, there, back, back, *among


def priced_table() -> dict[str, Rule]:
    """The rules. In context attention the rows of the batch are consecutive chunks of a sequence, and each needs the keys and
    values of all; with experts each rank holds some, and tokens are exchanged."""
    gathered = NamedFunction("batch0", "ap.context_attention_gathered", None, context_attention_collectives)
    dispatched = NamedFunction("batch0", "ap.experts_dispatched", None, experts_collectives)
    return {
        "ap.linear_float8": Rule(LINES["aten.linear"]),
        "ap.cross_entropy_in_place": Rule(LINES["ap.cross_entropy_sum"], functions=(FUNCTIONS["ap.cross_entropy_sum"],)),
        "ap.context_attention": Rule(attention_rule, functions=(gathered,)),
        "ap.experts": Rule(experts_rule, functions=(dispatched,), addends=False),
        "ap.experts_float8": Rule(experts_rule, functions=(dispatched,), addends=False),
    }


def priced_registry() -> Registry:
    """The rules of all operations, also of those that are only priced."""
    return Registry(MappingProxyType({**default_registry().rules, **priced_table()}))
