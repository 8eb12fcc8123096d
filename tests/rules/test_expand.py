"""Strategies of whole blocks: what is found, how many, and what is not."""

from __future__ import annotations

import pytest
from support.models.handwritten_blocks import Builder, embedding_block, gpt2_block, llama_block, loss_block
from support.models.operation_examples import build, i, t
from support.oracles.simulate_ranks import assert_sharded_equals_whole

from autopar.errors import UnsupportedOp
from autopar.ir.graph import Block
from autopar.ir.placement import Partial
from autopar.rules.expand import block_strategies, combine_axes, missing_rules
from autopar.rules.registry import AxisStrategy, Registry, default_registry

REGISTRY = default_registry()


def strategies(
    block: Block, size: int, batch_axis: bool = False, registry: Registry = REGISTRY
) -> dict[str, tuple[AxisStrategy, ...]]:
    return block_strategies(block, size, batch_axis=batch_axis, batch_is_symbolic=True, registry=registry)


def text(found: tuple[AxisStrategy, ...]) -> set[str]:
    return {str(strategy) for strategy in found}


def test_fused_projection_is_cut_by_heads() -> None:
    found = strategies(gpt2_block(), 4)
    assert "n(3): R, S(1,3), S(0,3) -> S(2,3)" in text(found["attn_c_attn"])
    assert "c: S(2,3) -> S(2), S(2), S(2)" in text(found["split_2_0"])
    assert "k: S(2), S(0), P -> P" in text(found["attn_c_proj"])


def test_megatron_is_among_the_strategies() -> None:
    found = strategies(llama_block(), 8)
    assert "n: R, S(0) -> S(2)" in text(found["q_proj"])
    assert "g: S(1), S(1), S(1) -> S(1)" in text(found["sdpa"])
    assert "k: S(2), S(1) -> P" in text(found["o_proj"])
    assert "batch1" not in {strategy.factor for strategy in found["sdpa"]}, "queries of causal attention are not cut"


def test_query_heads_in_a_group_take_a_second_axis() -> None:
    block = llama_block()
    node = next(node for node in block.nodes if node.name == "sdpa")
    axes = [strategies(block, size)["sdpa"] for size in (8, 4)]
    labels = {plan.factors for plan in combine_axes(axes, node, block.values(), (8, 4))}
    assert ("g", "r") in labels and ("g", "g") not in labels


def test_vocabulary_parallel_functions() -> None:
    words = text(strategies(embedding_block(), 4)["words"])
    assert "v: S(0), R -> P by ap.embedding_sharded" in words
    (loss,) = (s for s in strategies(loss_block(), 4)["cross_entropy_sum_2"] if s.function)
    assert str(loss) == "v: S(2), R -> I by ap.cross_entropy_sharded"
    assert [item.shape for item in loss.collectives] == [("B", 1024), (3, "B", 1024)]


def test_batch_axis_cuts_the_batch_only() -> None:
    for block in (llama_block(), gpt2_block(), loss_block()):
        for name, found in strategies(block, 4, batch_axis=True).items():
            for strategy in found:
                for operand, value in zip(strategy.operands, _operands(block, name), strict=True):
                    assert not str(operand).startswith("S") or isinstance(value.shape[operand.dim], str)  # type: ignore[union-attr]
    assert "batch0: S(0), R -> S(0)" in text(strategies(llama_block(), 4, batch_axis=True)["q_proj"])
    assert "batch0: S(0), S(0) -> P" in text(strategies(loss_block(), 4, batch_axis=True)["cross_entropy_sum_2"])


def _operands(block: Block, name: str) -> list:  # type: ignore[type-arg]
    node = next(node for node in block.nodes if node.name == name)
    return [block.values()[operand] for operand in node.operands()]


def test_no_strategy_mixes_invariant_and_replicate() -> None:
    for block in (llama_block(), gpt2_block(), embedding_block(), loss_block()):
        for name, found in strategies(block, 4).items():
            for strategy in found:
                places = [p for p, v in zip(strategy.operands, _operands(block, name), strict=True) if v.differentiable]
                assert not {"I", "R"} <= set(map(str, places))


def test_the_number_of_strategies_stays_low() -> None:
    block = llama_block()
    one = strategies(block, 8)
    assert sum(map(len, one.values())) / len(one) <= 6
    both = {
        node.name: combine_axes([one[node.name], strategies(block, 4)[node.name]], node, block.values(), (8, 4))
        for node in block.nodes
    }
    assert sum(map(len, both.values())) / len(both) <= 32


def one_op(op: str, *, differentiable: bool | None = None, no_grad: bool = False, result: str = "float32") -> Block:
    b = Builder("One")
    x = b.input("x", ("B", 8, 16))
    return b.block(b.op(op, x, shape=("B", 8, 16), name="y", differentiable=differentiable, no_grad=no_grad, dtype=result))  # type: ignore[arg-type]


def test_without_a_gradient_operands_may_be_invariant() -> None:
    for block in (
        one_op("aten.detach", differentiable=False),
        one_op("aten.relu", no_grad=True),
        one_op("aten.isnan", result="bool"),
    ):
        found = text(strategies(block, 4)["y"])
        assert {"redundant: R -> R", "redundant: I -> R"} <= found
        assert "redundant: I -> I" not in found and not any("P" in line for line in found)


def test_casts_pass_partial_only_where_they_widen() -> None:
    from autopar.ir.graph import DType

    for source, target, may in (("bfloat16", "float32", True), ("float32", "bfloat16", False), ("float32", "float32", True)):
        b = Builder("Cast", source)
        x = b.input("x", ("B", 8))
        block = b.block(b.op("aten.to.dtype", x, DType(target), shape=("B", 8), dtype=target, name="y"))  # type: ignore[arg-type]
        assert ("pass: P -> P" in text(strategies(block, 4)["y"])) == may


def test_an_unknown_op_is_redundant_and_listed() -> None:
    block = one_op("my.op")
    assert [node.op for node in missing_rules(block, REGISTRY)] == ["my.op"]
    assert text(strategies(block, 4)["y"]) == {"redundant: I -> I", "redundant: R -> R"}


def test_a_registered_rule_is_used_and_must_fit() -> None:
    block = one_op("my.op")
    found = strategies(block, 4, registry=REGISTRY.register("my::op", "b s h! -> b s h!"))
    assert text(found["y"]) == {"s: S(1) -> S(1)", "redundant: I -> I", "redundant: R -> R"}
    with pytest.raises(UnsupportedOp, match=r"my\.op at y: .*register_rule"):
        strategies(block, 4, registry=REGISTRY.register("my::op", "b s -> b s"))


@pytest.mark.parametrize(
    ("op", "args", "line", "label"),
    [
        ("aten._softmax", (t(4, 8), -1, False), "a b -> a b", "b"),
        ("aten.cumsum", (t(4, 8), 1), "a b -> a b", "b"),
        ("aten.transpose.int", (t(8, 8), 0, 1), "a b -> a b", "a"),
    ],
)
def test_a_proof_catches_a_wrong_line(op: str, args: tuple[object, ...], line: str, label: str) -> None:
    block, tensors = build(op, args, {})
    node = block.nodes[0]
    found = block_strategies(block, 2, batch_axis=False, batch_is_symbolic=False, registry=REGISTRY.register(op, line))
    strategy = next(strategy for strategy in found[node.name] if strategy.factor == label)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_sharded_equals_whole(node, tensors, [(p,) for p in strategy.operands], [(p,) for p in strategy.results], (2,))


def test_a_proof_catches_wrong_gradients() -> None:
    block, tensors = build("aten.linear", (t(4, 8), t(8, 8), t(8)), {})
    from autopar.ir.placement import parse_placement as p

    for operands, results in ((("I", "S(0)", "S(0)"), "S(1)"), (("S(1)", "S(1)", "R"), "P"), (("S(0)", "I", "R"), "S(0)")):
        with pytest.raises(AssertionError):
            assert_sharded_equals_whole(block.nodes[0], tensors, [(p(item),) for item in operands], [(p(results),)], (2,))


def test_a_counter_is_counted_once() -> None:
    """Whole numbers that are added to a buffer by parts: the buffer itself is a summand of one rank."""
    for op, args in (
        ("aten.index_add", (i(9, 4, 8), 0, i(4, 6), i(9, 6, 8))),
        ("aten.scatter_add", (i(9, 8), 0, i(8, 16), i(9, 16))),
    ):
        block, _ = build(op, args, {})
        found = block_strategies(block, 2, batch_axis=False, batch_is_symbolic=False, registry=REGISTRY)[block.nodes[0].name]
        summed = [strategy for strategy in found if strategy.results == (Partial(),)]
        assert summed and all(strategy.operands[0] == Partial() for strategy in summed), op
