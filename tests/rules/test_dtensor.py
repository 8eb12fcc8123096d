"""The table beside DTensor's own rules, operation by operation: whatever differs is named here, with its reason."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.operation_examples import build, single_operations
from support.oracles.dtensor_rules import Placed, every_answer
from support.oracles.simulate_ranks import assert_sharded_equals_whole

from autopar.ir.placement import Placement, parse_placement
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry

NOT_SUMS = "reductions over the axis other than sums are not placements that anything takes on"
HANDED_ON = "linear in that operand: exact, but a sum that is pending there is completed earlier at no more cost"
NO_VALUES = "values do not matter to the result"

THEIRS = {
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.index_select", "aten.detach"), HANDED_ON),
    **dict.fromkeys(("aten.avg_pool1d", "aten.adaptive_avg_pool1d", "aten.avg_pool2d", "aten._adaptive_avg_pool2d"), HANDED_ON),
    **dict.fromkeys(("aten.upsample_nearest2d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d"), HANDED_ON),
    **dict.fromkeys(("aten.constant_pad_nd", "aten.flip", "aten.roll", "aten.repeat"), HANDED_ON),
    **dict.fromkeys(("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like"), NO_VALUES),
    "aten.reshape": "the leading half of 6 x 4 read as 4 x 6: a cut that follows from the sizes, and is no factor of both",
    **dict.fromkeys(("aten.mean", "aten.any.dim", "aten.all.dim", "aten.prod.dim_int"), NOT_SUMS),
}
"""What DTensor offers and the table does not."""

OURS = {
    "aten.clone": "a copy of a summand is a summand",
    "aten.convolution": "DTensor cuts the batch only; channels are factors like those of a product",
    "aten.tril": "each matrix of a batch by itself",
    "aten.triu": "each matrix of a batch by itself",
    "aten.scatter_add": "what is added may come from different ranks",
    "aten.expand": "a dimension that is expanded may be made in parts",
}
"""What the table offers and DTensor does not. Cuts in parts, ``S(d,k)``, have no word there and are left out."""


@cache
def examples() -> tuple[tuple[str, int, object, object], ...]:
    seen: dict[str, int] = {}
    out = []
    for op, args, kwargs in single_operations():
        out.append((op, seen.get(op, 0), args, kwargs))
        seen[op] = seen.get(op, 0) + 1
    return tuple(out)


def plain(placement: Placement) -> str:
    return str(placement).replace("I", "R")


def ours(op: str, args: object, kwargs: object) -> set[Placed]:
    """Strategies of one axis of two ranks by the operation itself."""
    block, _ = build(op, args, kwargs)  # type: ignore[arg-type]
    found = block_strategies(block, 2, batch_axis=False, batch_is_symbolic=False, registry=default_registry())
    return {
        (tuple(map(plain, each.operands)), tuple(map(plain, each.results)))
        for each in found[block.nodes[0].name]
        if not each.function and "," not in "".join(map(str, (*each.operands, *each.results)))
    }


def is_wrong(op: str, args: object, kwargs: object, placed: Placed) -> bool:
    """Whether running the operation on shards so gives something else."""
    torch.manual_seed(0)
    block, tensors = build(op, args, kwargs)  # type: ignore[arg-type]
    operands, results = ([(parse_placement(text),) for text in side] for side in placed)
    try:
        assert_sharded_equals_whole(block.nodes[0], tensors, operands, results, (2,), "")
    except (AssertionError, RuntimeError, ValueError):
        return True
    return False


@pytest.mark.slow
def test_differences_are_named(ranks: RankPool) -> None:
    theirs = ranks.run_alone(every_answer, timeout=200)
    compared, wrong, unnamed, used = 0, [], [], set()
    for op, index, args, kwargs in examples():
        answers = set(theirs[op][index])
        if not answers:
            continue
        compared += 1
        mine = ours(op, args, kwargs)
        for placed in answers - mine:
            if op in THEIRS:
                used.add(op)
            elif is_wrong(op, args, kwargs, placed):
                wrong.append((op, placed))
            else:
                unnamed.append(("theirs", op, index, placed))
        for placed in mine - answers:
            used.add(op)
            if op not in OURS:
                unnamed.append(("ours", op, placed))
    assert compared > 200 and not unnamed, unnamed
    assert {op for op, _ in wrong} <= {"aten.cumsum", "aten.gather"}, f"DTensor of torch 2.13 is wrong at two operations: {wrong}"
    assert used == {*THEIRS, *OURS}, f"named, but alike: {({*THEIRS, *OURS}) - used}"
