"""The collectives counted from a lowered program are those that its ranks run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.harness.rank_pool import RankPool
from support.harness.run_program import count_collectives
from support.models.handwritten_blocks import gpt2_graph
from support.oracles.expected_collectives import collectives
from support.oracles.interpret_graph import make_batch, make_state
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.passes.lower import lower
from autopar.program.build import render


@pytest.mark.parametrize("seed", range(3))
def test_counted_is_what_runs(seed: int, ranks: RankPool) -> None:
    graph = gpt2_graph(2, 16, 4, 32, 8, 8, dtype="float64")
    candidate = drawn_candidate(graph, mesh_of(dp=1, tp=4), seed, wild=0.1 * seed)
    plans = tuple(replace(plan, recompute=seed == 2 and plan.block == "GPT2Block") for plan in candidate.blocks)
    lowered = lower(graph, replace(candidate, blocks=plans))
    found: Any = ranks.run(count_collectives, render(lowered), make_state(graph), make_batch(graph, 32))[0]
    expected: Counter[str] = Counter()
    for (_, kind, _), count in collectives(lowered).items():
        expected[kind] += count
    assert found == expected
