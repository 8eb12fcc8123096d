"""PipeDream-2BW on real processes: each update uses the gradients of the weights before the last one, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.models.small_models import make
from support.plans.pipeline_plans import candidate_text, pipeline_candidate
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline
from autopar.verification.single import LiftCasts

RATE = 1e-2
STEPS = 5
Record = tuple[list[float], dict[str, Tensor]]


def batches(prepared: Prepared) -> list[dict[str, Tensor]]:
    """One for each step, all different."""
    return [{name: tensor.roll(step, 0).roll(step, -1) for name, tensor in prepared.batch.items()} for step in range(STEPS)]


def delayed(prepared: Prepared, name: str, penalty: float) -> Record:
    """On one process: the losses, and the parameters after all updates but the last have used gradients one step old. The last
    loss has a penalty of the parameters."""
    model, _ = make(name, torch.float64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    last: dict[str, Tensor | None] = dict.fromkeys(dict(model.named_parameters()))

    def use_gradients_of_the_step_before(_: int = 0) -> None:
        for key, parameter in model.named_parameters():
            last[key], parameter.grad = parameter.grad, last[key]

    with LiftCasts():
        losses = train(model, batches(prepared), optimizer, after_backward=use_gradients_of_the_step_before).losses
    use_gradients_of_the_step_before()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad + 2 * penalty * parameter.detach()
    optimizer.step()
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def run_windows(
    text: str, state: dict[str, Tensor], given: list[dict[str, Tensor]], rate: float, penalty: float
) -> tuple[Any, ...]:
    """On a rank: losses as they come, the loss of a look without gradients, and everything at the end."""

    parallel = parallel_model(text, state)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=rate)
    look = []

    def evaluate(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                look.append(parallel(**given[0]).item())

    losses = train(parallel, given, optimizer, after_backward=evaluate).losses
    loss = parallel.flush()
    (loss + penalty * sum(p.square().sum() for p in parallel.parameters()) if penalty else loss).backward()
    optimizer.step()
    return [*losses, loss.item()], look[0], parallel.full_state()


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(("stages", "data"), [(2, 1), (2, 2), (4, 1)])
def test_gradients_are_one_step_old(model: str, stages: int, data: int, ranks: RankPool) -> None:
    prepared = prepare(model, batch=16)
    candidate = pipeline_candidate(prepared, {"dp": data}, Pipeline(stages, weight_versions=2), 4)
    penalty = 0.1 if (stages, data) == (2, 1) else 0.0
    losses, parameters = delayed(prepared, model, penalty)
    found = ranks.run(
        run_windows, candidate_text(prepared, candidate), prepared.state, batches(prepared), RATE, penalty, world=stages * data
    )
    for told, _, state in found:
        assert told[0] == 0.0
        assert told[1:] == pytest.approx(losses, rel=1e-9)
        mine = {name: state[name] for name in parameters}
        assert not differences((0.0, {}, mine, {}), (0.0, {}, parameters, {}), 1e-9)
    assert len({look for _, look, _ in found}) == 1


def test_requirements() -> None:
    prepared = prepare("gpt2", batch=16)
    with pytest.raises(PlanError, match="at least 4 micro-batches"):
        candidate_text(prepared, pipeline_candidate(prepared, {}, Pipeline(4, weight_versions=2), 2))
    with pytest.raises(PlanError, match="1f1b with one chunk"):
        candidate_text(prepared, pipeline_candidate(prepared, {}, Pipeline(2, 1, "gpipe", weight_versions=2), 4))
    candidate = pipeline_candidate(prepared, {"dp": 2, "zero": 3}, Pipeline(2, weight_versions=2), 4)
    with pytest.raises(PlanError, match="whole state"):
        candidate_text(prepared, candidate)
    again = replace(candidate, blocks=tuple(replace(plan, zero=0, recompute=True) for plan in candidate.blocks))
    with pytest.raises(PlanError, match="no recomputation"):
        candidate_text(prepared, again)
