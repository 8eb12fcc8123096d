"""Mixtures of routed experts:
``ap.moe_experts(x, experts, weights, up, down, up_bias, down_bias, activation, layout, capacity)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Block, Graph, Node, Parameter
from autopar.operations.notation.rule import DerivedLine, NamedFunction, OperationCollective, argument
from autopar.operations.notation.spelling import OperationCall, function
from autopar.operations.operation import Operation, Sizes

MOE_EXPERTS = "ap.moe_experts"
DISPATCHED, EXPERTS_START, EXPERTS_WAIT = "ap.moe_experts_dispatched", "ap.moe_experts_start", "ap.moe_experts_wait"
PUBLISHED, PUBLISHED_FLOAT8 = "ap.experts", "ap.experts_float8"
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
            if node.op == MOE_EXPERTS:
                number = values[node.operands()[3]].shape[0]
                if isinstance(number, int) and number % parts:
                    return node, number
    return None


def experts_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``ap.experts(x, scores, up, down, top_k, ep=...)``: shards tokens; or the inner dimension of every expert (summed).

    ``up`` is [E, F, H] or, with gates, [E, 2 F, H]; ``down`` is [E, H, F]. It is not ``ap.moe_experts``: the router's scores are
    an operand, and expert parallelism is an argument (a group within the data axis, as in published runs) and no factor.
    """
    inner = "(2 f+)" if shapes[2][1] != shapes[3][2] else "f+"
    return DerivedLine(f"... h!, ... e!, e! {inner} h!, e! h! f+ -> ... h!")


def expert_degrees(block: Block) -> dict[Parameter, int]:
    """Return, by expert weight, over how many neighbouring data ranks its dimension 0 is sharded outside of the mesh, if over
    several."""
    experts = [node for node in block.nodes if node.op in (PUBLISHED, PUBLISHED_FLOAT8)]
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


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """Global sizes. Each of `tokens` goes through `top_k` of `experts`; `up` counts both halves where there is a gate. `ep` is
    the expert parallelism that the operation itself names (1: placements say it)."""

    tokens: int
    top_k: int
    experts: int
    ep: int
    hidden: int
    up: int
    down: int

    @staticmethod
    def of(op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg], operands: Sequence[Sequence[int]]) -> ExpertShapes:
        """Return the sizes of ``ap.experts(x, scores, up, down, top_k, ep=...)``, or ``ap.moe_experts(x, experts, weights, up,
        down, ...)``."""
        if op == MOE_EXPERTS:
            x, ids, _, up, down, *_ = operands
            top_k, ep = ids[-1], 1
            wide, inner = prod(up[1:]) // x[-1], prod(down[1:]) // x[-1]
        else:
            x, _, up, down = operands
            given_top_k, given_ep = args[4], kwargs.get("ep", 1)
            assert isinstance(given_top_k, int) and isinstance(given_ep, int)
            top_k, ep = given_top_k, given_ep
            wide, inner = up[1], down[2]
        return ExpertShapes(tokens=prod(x[:-1]), top_k=top_k, experts=up[0], ep=ep, hidden=x[-1], up=wide, down=inner)

    @property
    def copies(self) -> int:
        """Token copies: each token once for each of its experts."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward: both products of each token copy."""
        return 2.0 * self.copies * ((self.up + self.down) * self.hidden)


def _flops(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    """Every token through `top_k` experts: ``2 tokens k (F_up + F_down) H``."""
    return ExpertShapes.of(node.op, node.args, dict(node.kwargs), a).flops


def _expression(call: OperationCall) -> str:
    """``C.moe_experts(x, experts, weights, up, down, activation="silu", layout="halves")``."""
    names = ("activation", "layout", "capacity")
    matrices = call.args[:5] if call.args[5:7] == ("None", "None") else call.args[:7]
    options = {name: text for name, text in zip(names, call.args[7:], strict=False) if text != "None"} | call.kwargs
    return f"C.{call.packet}({replace(call, args=matrices, kwargs=options).listed()})"


FUNCTIONS = (
    # tokens are replicated: each rank computes the copies that go to its own experts
    NamedFunction("e", "ap.moe_experts_owned", at=(3, 0)),
    # tokens are sharded too: their copies are exchanged
    NamedFunction("e", DISPATCHED, None, dispatch_collectives, also=("...",), at=(3, 0)),
)

OPERATIONS = (
    Operation(MOE_EXPERTS, moe_experts_rule, functions=FUNCTIONS, flops=_flops, experts=True, spelling=_expression),
    *(Operation(name, spelling=_expression) for name in ("ap.moe_experts_owned", DISPATCHED, EXPERTS_START)),
    Operation(EXPERTS_WAIT, spelling=function("C")),
    Operation("ap.expert_capacity", "... t! k! -> ... t! k!", spelling=function("C")),
    # each rank holds some experts, and tokens are exchanged
    *(
        Operation(
            name, experts_rule, functions=(NamedFunction("batch0", "ap.experts_dispatched", None, experts_collectives),),
            addends=False, flops=_flops, experts=True, float8=float8, published=True,
        )
        for name, float8 in ((PUBLISHED, False), (PUBLISHED_FLOAT8, True))
    ),
)  # fmt: skip
