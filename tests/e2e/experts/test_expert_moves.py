"""Which experts change places: what pays, what is refused, which programs can follow, and how experts are assigned to ranks."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

import pytest
import torch
from e2e.experts.test_rebalanced_experts import SKEWED, refused, routed, routed_batch_of, routed_parallel
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.plans.expert_forms import text_of
from torch import Tensor

import autopar
from autopar.program.load import load_program
from autopar.runtime.experts.mixtures import _mixture_of
from autopar.runtime.experts.rebalancing import assign_experts
from autopar.runtime.state.lend import lend_state


def prices_on_rank() -> list[str]:
    """What pays moves; what does not, or does not fit, does not."""
    parallel = routed_parallel(routed())
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with parallel.expert_load() as loads:
        parallel(**routed_batch_of(8)).backward()
    few = parallel.rebalance_experts([SKEWED[0]], optimizer, steps=0)
    assert few.layers == () and few.imbalance[0] == few.imbalance[1] and not parallel._expert_placement.orders
    even = parallel.rebalance_experts([[1.0] * 8], optimizer, steps=None)
    assert even.layers == () and not parallel._expert_placement.orders
    many = parallel.rebalance_experts([SKEWED[0]], optimizer, steps=10**9)
    assert len(many.layers) == 1 and many.step_seconds[1] < many.step_seconds[0] and many.move_seconds > 0
    parallel.rebalance_experts(loads, optimizer)
    for bad in (None, [], [[1.0] * 7], [[-1.0] * 8], [[0.0] * 8], [[float("nan")] * 8], [["a"] * 8], 3):
        refused("parallel.expert_load()", lambda bad=bad: parallel.rebalance_experts(bad, optimizer))  # type: ignore[misc]
    for steps in (-1, "many"):
        refused("is no number of steps", lambda steps=steps: parallel.rebalance_experts([SKEWED[0]], optimizer, steps=steps))  # type: ignore[misc]
    other = [float(torch.distributed.get_rank() + 1)] * 8
    refused("on all ranks", lambda: parallel.rebalance_experts([other], optimizer))
    factored = torch.optim.Adafactor(parallel.parameters(), lr=1e-2)
    parallel.restore_experts()
    factored.step()
    refused("is not placed like up", lambda: parallel.rebalance_experts([SKEWED[0]], factored, steps=None))
    logger.removeHandler(handler)
    return lines


def test_only_what_pays_moves(ranks: RankPool) -> None:
    lines, *others = ranks.run(prices_on_rank, timeout=200)
    assert not any("experts" in line for each in others for line in each)
    said = [line for line in lines if "experts" in line]
    assert "stay where they are" in said[0] and "no move is predicted to pay within 0 steps" in said[0]
    assert "no order has less load" in said[1]
    assert "the experts of 1 of 1 layers are placed anew" in said[2] and "ms a step instead of" in said[2]


def gathering_on_rank(text: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    """Another program of the same weights that gathers the experts runs in the model's order only."""
    parallel = parallel_model(text, state)
    parallel.rebalance_experts([[9.0, 8.0, 1.0, 2.0]], steps=None)
    placement = parallel._expert_placement
    line = next(line for line in text.splitlines() if "= C.moe_experts_wait(" in line)
    for more, fits in (("", True), ("penalty = self.up.sum()", False)):
        other = load_program(text.replace(line, f"{line}\n        {more}")).Program(parallel.program.mesh)
        lend_state(other, parallel.program, parallel.state)
        if fits:
            placement.adopt(other)
            assert abs(other(**batch).item() - parallel(**batch).item()) < 1e-12
        else:
            refused("restore_experts() before", lambda other=other: placement.adopt(other))  # type: ignore[misc]
            parallel.restore_experts()
            placement.adopt(other)


def test_programs_that_gather_the_experts_are_refused(ranks: RankPool) -> None:
    prepared = prepare("routed")
    ranks.run(gathering_on_rank, text_of(prepared, "dispatched, dp=2,ep=2", zero=0), prepared.state, prepared.batch, timeout=100)


def whole_experts_on_rank() -> None:
    parallel = autopar.parallelize(routed(), "local:2", routed_batch_of(8), force="dp=2", cache=False)
    refused('force="ep=2"', lambda: parallel.rebalance_experts([SKEWED[0]], steps=None))


def test_experts_that_are_not_sharded(ranks: RankPool) -> None:
    ranks.run(whole_experts_on_rank, world=2, timeout=100)


@pytest.mark.parametrize("ranks_", [1, 2, 4, 8])
def test_assignments_are_orders_that_lower_the_load(ranks_: int) -> None:
    draws = random.Random(ranks_)
    for _ in range(200):
        loads = tuple(draws.choice((0.0, 1.0, 5.0, 40.0, 90.0)) for _ in range(8))
        before = tuple(draws.sample(range(8), 8))
        after = assign_experts(loads, before, ranks_)
        parts = [[order[at : at + 8 // ranks_] for at in range(0, 8, 8 // ranks_)] for order in (before, after)]
        busiest, now = (max(sum(loads[expert] for expert in part) for part in order) for order in parts)
        assert sorted(after) == list(range(8)) and (now < busiest or after == before)
        for own, other in zip(*parts, strict=True):
            assert all(one == two for one, two in zip(own, other, strict=True) if one in other), "they moved"
        assert assign_experts(loads, after, ranks_) == after


def test_weights_that_are_read_elsewhere_too_are_no_experts() -> None:
    text = text_of(prepare("routed"), "dispatched, ep=4")
    line = next(line for line in text.splitlines() if "= C.moe_experts_wait(" in line)
    for more, found in (("", True), ("penalty = self.up.sum()", False)):
        block = load_program(text.replace(line, f"{line}\n        {more}")).Main
        mixture = _mixture_of(block)
        assert mixture == ("ep", ["up", "down", "up_bias", "down_bias"]) if found else mixture is None, more
