"""Operations that are only priced: their lines proven by execution of a plain function on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.operation_examples import build, t
from support.oracles import simulate_ranks
from torch import Tensor

from autopar.operations.table import operations
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry


def experts(x: Tensor, scores: Tensor, up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """Every token through its best experts; dense, as a reference."""
    weights, chosen = scores.topk(top_k, -1)
    gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
    inner = torch.einsum("...h,efh->...ef", x, up)
    if up.shape[1] != down.shape[2]:
        gate, value = inner.chunk(2, -1)
        inner = F.silu(gate) * value
    return torch.einsum("...ef,ehf,...e->...h", inner, down, gates)


def chunks(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, parts: int) -> Tensor:
    """Groups of `parts` rows are one sequence."""
    whole = [x.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2, 3) for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*whole, is_causal=is_causal)
    return y.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)


REFERENCE = {
    "ap.linear_float8": F.linear,
    "ap.experts": experts,
    "ap.experts_float8": experts,
    "ap.context_attention": chunks,
    "ap.cross_entropy_in_place": simulate_ranks.AP["ap.cross_entropy_sum"],
}
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("ap.linear_float8", (t(8, 4, 8), t(16, 8)), {}),
    ("ap.linear_float8", (t(8, 4, 8), t(16, 8), t(16)), {}),
    ("ap.experts", (t(8, 4, 8), t(8, 4, 4), t(4, 8, 8), t(4, 8, 8), 2), {}),
    ("ap.experts_float8", (t(8, 4, 8), t(8, 4, 4), t(4, 16, 8), t(4, 8, 8), 2), {}),
    ("ap.context_attention", (t(8, 4, 4, 8), t(8, 4, 4, 8), t(8, 4, 4, 8)), {"is_causal": True, "parts": 4}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[f"{case[0]}-{index}" for index, case in enumerate(CASES)])
@pytest.mark.parametrize("size", [2, 4])
def test_line_is_exact(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a named function does (exchanges between ranks) is priced and has no program; every other strategy runs."""
    torch.manual_seed(0)
    monkeypatch.setitem(simulate_ranks.AP, op, REFERENCE[op])
    block, tensors = build(op, args, kwargs)
    found = block_strategies(block, size, batch_axis=False, batch_is_symbolic=False, registry=default_registry(published=True))
    proven = 0
    for strategy in dict.fromkeys(found[block.nodes[0].name]):
        if strategy.function:
            continue
        operands, results = [(place,) for place in strategy.operands], [(place,) for place in strategy.results]
        simulate_ranks.assert_sharded_equals_whole(block.nodes[0], tensors, operands, results, (size,))
        proven += strategy.factor not in ("redundant", "pass")
    assert proven, "no sharded strategy was run"


def test_plans_cannot_have_them() -> None:
    """The planner's own rules know none of them; where they are priced, all other rules are the planner's."""
    published = {name for name, record in operations().items() if record.published}
    assert not published & set(default_registry().rules)
    assert set(REFERENCE) == published
    common = default_registry().rules
    assert {op: rule for op, rule in default_registry(published=True).rules.items() if op in common}.keys() == common.keys()
