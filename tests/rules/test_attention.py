"""Which ways of cutting attention are offered, and which are not. That they are exact is proven in test_proofs."""

from __future__ import annotations

from typing import Any

import pytest
from support.models.operation_examples import TensorSpec, build, m, t

from autopar.ir.graph import Block
from autopar.ir.placement import Shard
from autopar.operations.attention import is_mirrored, last_rank_imbalance
from autopar.rules.expand import block_strategies, combine_axes
from autopar.rules.registry import AxisStrategy, default_registry

SDPA = "aten.scaled_dot_product_attention"


def block_of(
    s: int = 16, k: int = 0, heads: tuple[int, int] = (4, 4), mask: TensorSpec | None = None, dropout: float = 0.0,
    causal: bool = False, window: tuple[int, int] | None = None,
) -> Block:  # fmt: skip
    """Attention of 16 queries."""
    keys = t(2, heads[1], k or s, 4)
    kwargs: dict[str, Any] = {"enable_gqa": True} | ({"window": window} if window else {})
    return build("ap.attention" if window else SDPA, (t(2, heads[0], s, 4), keys, keys, mask, dropout, causal), kwargs)[0]


def strategies(block: Block, size: int) -> tuple[AxisStrategy, ...]:
    return block_strategies(block, size, batch_axis=False, batch_is_symbolic=False, registry=default_registry())[
        block.nodes[0].name
    ]


def ways(block: Block, size: int) -> set[str]:
    """Of the sequence and the heads: label, and the function's name."""
    return {
        f"{each.factor} {each.function.removeprefix('ap.attention_')}".strip()
        for each in strategies(block, size)
        if each.factor not in ("redundant", "batch0")
    }


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (block_of(), {"batch1", "s", "s t ring"}),
        (block_of(k=8), {"batch1", "s", "s t ring"}),
        (block_of(causal=True), {"batch1", "s rows", "s t ring"}),
        (block_of(window=(3, 0)), {"batch1", "s rows", "s t ring"}),
        (block_of(mask=m(2, 1, 16, 16)), {"batch1", "s", "s t ring"}),
        (block_of(k=6), {"batch1", "s"}),
        (block_of(s=18, k=16), {"batch1"}),
        (block_of(s=18, causal=True), {"batch1"}),
        (block_of(dropout=0.5), {"batch1", "s"}),
        (block_of(dropout=0.5, causal=True), {"batch1"}),
        (block_of(heads=(8, 2)), {"h heads", "s", "s t ring"}),
        (block_of(heads=(4, 2), causal=True), {"h heads", "s rows", "s t ring"}),
        (block_of(heads=(16, 4)), {"g", "h heads", "s", "s t ring"}),
    ],
)
def test_offered_on_four_ranks(block: Block, expected: set[str]) -> None:
    assert ways(block, 4) == expected


def test_three_dimensions_have_no_function() -> None:
    block, _ = build(SDPA, (t(4, 8, 4), t(4, 8, 4), t(4, 8, 4), None, 0.0, True), {})
    assert ways(block, 4) == set()


def test_a_function_has_its_dimensions_alone() -> None:
    """Heads one by one on one axis and by groups on another would meet other keys than theirs."""
    block = block_of(heads=(16, 4))
    values, node = block.values(), block.nodes[0]
    axis = strategies(block, 2)
    plans = combine_axes([axis, axis], node, values, (2, 2))
    assert plans
    for plan in plans:
        cut = [sum(at[axis] == Shard(dim) for axis in (0, 1)) for dim, at in ((1, plan.operands[0]), (2, plan.operands[0]))]
        if plan.function == "ap.attention_heads":
            assert cut[0] == 1
        elif plan.function:
            assert cut[1] == 1


def test_where_work_is_even() -> None:
    shapes = ((2, 4, 16, 4),) * 3
    even = {"causal": block_of(causal=True), "wide": block_of(causal=True, window=(10, -1))}
    uneven = {"narrow": block_of(causal=True, window=(3, -1)), "full": block_of(), "rows": block_of(mask=m(2, 1, 16, 16))}
    assert all(is_mirrored(block.nodes[0], shapes) for block in even.values())
    assert not any(is_mirrored(block.nodes[0], (*shapes, (2, 1, 16, 16))) for block in uneven.values())
    assert (
        last_rank_imbalance(even["causal"].nodes[0], shapes, 4) == 2 - 1 / 4
    )  # rows 12 to 15 of 16: 7/16 of the area, a quarter would be 1/4
    assert last_rank_imbalance(uneven["narrow"].nodes[0], shapes, 4) == 1.0
