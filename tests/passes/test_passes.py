"""Each pass on a block of a few lines, before and after as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import Builder, gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.errors import PlanError
from autopar.ir.graph import Block, Node, Ref, Symbol, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import parse_placements
from autopar.ir.plan import BlockPlan, Conversion, NodePlan, Precision
from autopar.ir.text import format_node
from autopar.passes.base import BlockState, Context
from autopar.passes.bucket_conversions import BucketConversions
from autopar.passes.dead_code import DeadCode
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.localize import Localize
from autopar.passes.lower import captured_placements, lower, passes
from autopar.passes.overlap import OverlapCollectives
from autopar.passes.parameters import CastParameters, CopyParameterViews
from autopar.passes.readable_names import ReadableNames, identifier
from autopar.passes.verify import verify

MESH = mesh_of(dp=2, tp=4)
P = parse_placements


def at(*texts: str) -> tuple:  # type: ignore[type-arg]
    return tuple(map(P, texts))


def plan_of(
    block: Block, nodes: list[NodePlan], conversions: list[Conversion], inputs: tuple, parameters: tuple, outputs: tuple
) -> BlockPlan:  # type: ignore[type-arg]
    return BlockPlan(block.name, inputs, parameters, outputs, tuple(nodes), tuple(conversions), 0)


def context(plan: BlockPlan, mesh: Mesh = MESH, precision: Precision | None = None) -> Context:
    return Context(mesh, plan, precision or Precision(), 4)


def lines(state: BlockState) -> list[str]:
    return [format_node(node) for node in state.block.nodes]


def two_linears() -> tuple[Block, BlockPlan]:
    """Sequence-sharded x, gathered once for two column-parallel layers, then reduced."""
    b = Builder("Two")
    x = b.input("x", ("B", 16, 64))
    u = b.op("aten.linear", x, b.parameter("up.weight", (32, 64)), shape=("B", 16, 32), name="u")
    v = b.op("aten.linear", x, b.parameter("gate.weight", (32, 64)), shape=("B", 16, 32), name="v")
    r = b.op("aten.reshape", u, (Symbol("B"), 16, 8, 4), shape=("B", 16, 8, 4), name="r")
    m = b.op("aten.div.Tensor", v, Symbol("16*B"), shape=("B", 16, 32), name="m")
    block = b.block(r, m)  # type: ignore[arg-type]
    split = "S(0) S(2)"
    nodes = [
        NodePlan("u", at("S(0) R", "R S(0)"), at(split), ("b", "n")),
        NodePlan("v", at("S(0) R", "R S(0)"), at(split), ("b", "n")),
        NodePlan("r", at(split), at(split), ("b", "n")),
        NodePlan("m", at(split), at(split), ("b", "n")),
    ]
    conversions = [Conversion("x", P("S(0) S(1)"), P("S(0) R")), Conversion("m", P(split), P("S(0) I"))]
    return block, plan_of(block, nodes, conversions, at("S(0) S(1)"), at("R S(0)", "R S(0)"), at(split, "S(0) I"))


def begin(block: Block, plan: BlockPlan) -> BlockState:
    return BlockState(block, captured_placements(block, plan))


def test_insert_conversions() -> None:
    block, plan = two_linears()
    state = InsertConversions().run(begin(block, plan), context(plan))
    verify(state, context(plan), "insert_conversions")
    assert lines(state) == [
        "%x_full: float32'[B, 16, 64] = ap.convert(%x, axis='tp', conversion='S(1) -> R')",
        "%u: float32'[B, 16, 32] = aten.linear(%x_full, %up_weight)",
        "%v: float32'[B, 16, 32] = aten.linear(%x_full, %gate_weight)",
        "%r: float32'[B, 16, 8, 4] = aten.reshape(%u, (<B>, 16, 8, 4))",
        "%m: float32'[B, 16, 32] = aten.div.Tensor(%v, <16*B>)",
        "%m_full: float32'[B, 16, 32] = ap.convert(%m, axis='tp', conversion='S(2) -> I')",
    ]
    assert state.block.outputs == ("r", "m_full")


def test_a_missing_conversion_is_named() -> None:
    block, plan = two_linears()
    with pytest.raises(PlanError, match=r"the plan has no conversion of x to S\(0\) R"):
        InsertConversions().run(begin(block, plan), context(replace(plan, conversions=plan.conversions[1:])))


def test_localize() -> None:
    block, plan = two_linears()
    state = Localize().run(InsertConversions().run(begin(block, plan), context(plan)), context(plan))
    verify(state, context(plan), "localize")
    assert lines(state) == [
        "%x_full: float32'[B, 16, 64] = ap.convert(%x, axis='tp', conversion='S(1) -> R')",
        "%u: float32'[B, 16, 8] = aten.linear(%x_full, %up_weight)",
        "%v: float32'[B, 16, 8] = aten.linear(%x_full, %gate_weight)",
        "%r: float32'[B, 16, 2, 4] = aten.reshape(%u, (<B>, 16, 2, 4))",
        "%m: float32'[B, 16, 8] = aten.div.Tensor(%v, <32*B>)",
        "%m_full: float32'[B, 16, 32] = ap.convert(%m, axis='tp', conversion='S(2) -> I')",
    ]
    assert state.block.inputs[0].shape == ("B", 4, 64)


def test_overlap() -> None:
    block, plan = two_linears()
    state = Localize().run(InsertConversions().run(begin(block, plan), context(plan)), context(plan))
    nodes = list(state.block.nodes)
    moved = state.with_nodes([*nodes[:3], nodes[4], nodes[3], nodes[5]])
    tanh = Node("aten.tanh", (Ref("r"),), (), (Value("t", ("B", 16, 2, 4), "float32", True),))
    longer = replace(
        moved.with_nodes([*moved.block.nodes[:5], tanh, nodes[5]]), placements={**moved.placements, "t": P("S(0) S(2)")}
    )
    after = OverlapCollectives().run(longer, context(plan))
    verify(after, context(plan), "overlap")
    assert [node.op for node in after.block.nodes] == [
        "ap.convert",
        "aten.linear",
        "aten.linear",
        "aten.div.Tensor",
        "ap.start",
        "aten.reshape",
        "aten.tanh",
        "ap.wait",
    ]
    assert OverlapCollectives().run(moved, context(plan)) == moved  # a reshape hides nothing


def norms(dtype: str = "float32") -> tuple[Block, BlockPlan]:
    """Two elementwise layers of a sequence shard, whose Invariant weights are needed Replicate."""
    b = Builder("Norms", dtype)
    x = b.input("x", ("B", 16, 8))
    one = b.op("aten.mul.Tensor", x, b.parameter("a", (8,)), shape=("B", 16, 8), name="one")
    two = b.op("aten.mul.Tensor", one, b.parameter("b", (8,)), shape=("B", 16, 8), name="two")
    unused = b.op("aten.neg", two, shape=("B", 16, 8), name="unused")
    assert isinstance(unused, Ref)
    block = b.block(two)  # type: ignore[arg-type]
    sharded = "S(0) S(1)"
    nodes = [NodePlan(name, at(sharded, "R R"), at(sharded), ("b", "s")) for name in ("one", "two")]
    nodes.append(NodePlan("unused", at(sharded), at(sharded), ("b", "s")))
    conversions = [Conversion(name, P("R I"), P("R R")) for name in ("a", "b")]
    return block, plan_of(block, nodes, conversions, at(sharded), at("R I", "R I"), at(sharded))


def lowered_norms(precision: Precision | None = None, dtype: str = "float32") -> tuple[BlockState, Context]:
    block, plan = norms(dtype)
    ctx = context(plan, precision=precision)
    return DeadCode().run(Localize().run(InsertConversions().run(begin(block, plan), ctx), ctx), ctx), ctx


def test_dead_code() -> None:
    state, _ = lowered_norms()
    assert [node.name for node in state.block.nodes] == ["a_replicated", "one", "b_replicated", "two"]


def test_bucket_conversions() -> None:
    state, ctx = lowered_norms()
    state = BucketConversions().run(state, ctx)
    verify(state, ctx, "bucket")
    assert lines(state)[0] == (
        "%a_replicated: float32'[8], %b_replicated: float32'[8] = ap.convert_many((%a, %b), axis='tp', conversion='I -> R')"
    )
    assert len(state.block.nodes) == 3
    apart, ctx = lowered_norms()
    assert BucketConversions(small_bytes=8).run(apart, ctx) == apart


def test_cast_parameters() -> None:
    state, ctx = lowered_norms(Precision("bfloat16", "float32"), "bfloat16")
    state = BucketConversions().run(CastParameters().run(state, ctx), ctx)
    verify(state, ctx, "cast_parameters")
    assert [value.value.dtype for value in state.block.parameters] == ["float32", "float32"]
    assert lines(state)[:3] == [
        "%a_cast: bfloat16'[8] = aten.to.dtype(%a, bfloat16)",
        "%b_cast: bfloat16'[8] = aten.to.dtype(%b, bfloat16)",
        "%a_replicated: bfloat16'[8], %b_replicated: bfloat16'[8] = "
        "ap.convert_many((%a_cast, %b_cast), axis='tp', conversion='I -> R')",
    ]


def test_views_of_parameters_that_a_block_returns_are_copied_under_zero() -> None:
    for zero in (0, 3):
        state, ctx = lowered_norms()
        block = replace(state.block, outputs=("one", "b_replicated"))
        ctx = replace(ctx, plan=replace(ctx.plan, zero=zero))
        after = CopyParameterViews().run(replace(state, block=block), ctx)
        verify(after, ctx, "copy_parameter_views")
        assert after.block.outputs == (("one", "b_replicated_copy") if zero else ("one", "b_replicated"))
        assert len(after.block.nodes) == len(block.nodes) + (zero > 0)


def test_readable_names() -> None:
    state, ctx = lowered_norms()
    nodes = [
        replace(node, module="block.ln_1", op="aten.layer_norm") if node.name == "one" else node for node in state.block.nodes
    ]
    names = [node.name for node in ReadableNames().run(state.with_nodes(nodes), ctx).block.nodes]
    assert names == ["a_replicated", "ln_1", "b_replicated", "two"]
    assert [identifier(text) for text in ("a.b", "3x", "for", "slice", "torch")] == ["a_b", "x3x", "for_", "part", "torch_"]


def test_the_driver_names_the_culprit() -> None:
    state, ctx = lowered_norms()
    broken = state.with_nodes([node for node in state.block.nodes if node.name != "a_replicated"])
    with pytest.raises(AssertionError, match="after dead_code, block Norms: one reads %a_replicated before it is produced"):
        verify(broken, ctx, "dead_code")
    wrong = [
        replace(node, outputs=(replace(node.outputs[0], shape=(4,)),)) if node.name == "a_replicated" else node
        for node in state.block.nodes
    ]
    with pytest.raises(AssertionError, match=r"%a_replicated is \[4\] but I -> R of \[8\] is \[8\]"):
        verify(state.with_nodes(wrong), ctx, "localize")


def test_the_ir_is_dumped_after_every_pass() -> None:
    graph = gpt2_graph(2, 16, 4, 32, 8, 8)
    dumps: dict[str, str] = {}
    lower(graph, drawn_candidate(graph, mesh_of(dp=2, tp=2), 0), dumps.__setitem__)
    assert len(dumps) == len(passes()) * 3
    assert dumps["GPT2Block.03.localize"].startswith("block GPT2Block(\n    %hidden: float32'[B, 8,")


def test_sizes_that_do_not_divide_are_an_error() -> None:
    block, plan = two_linears()
    mesh = mesh_of(dp=2, tp=3)
    with pytest.raises(PlanError, match="cannot be sharded"):
        Localize().run(InsertConversions().run(begin(block, plan), context(plan, mesh)), context(plan, mesh))


def test_a_plan_for_other_ops_is_an_error() -> None:
    block, plan = two_linears()
    with pytest.raises(PlanError, match="not those of the graph"):
        captured_placements(block, replace(plan, nodes=plan.nodes[1:]))
