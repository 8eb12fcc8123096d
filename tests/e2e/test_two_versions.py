"""PipeDream-2BW on real processes: each update uses the gradients of the weights before the last one, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.endtoend import Prepared, differences, loss_of, prepare
from support.lift import LiftedCasts
from support.models import make
from support.pipelines import piped, text_of
from support.ranks import Ranks
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline

RATE = 1e-2
STEPS = 5
Told = tuple[list[float], dict[str, Tensor]]


def batches(prepared: Prepared) -> list[dict[str, Tensor]]:
    """One for each step, all different."""
    return [{name: tensor.roll(step, 0).roll(step, -1) for name, tensor in prepared.batch.items()} for step in range(STEPS)]


def delayed(prepared: Prepared, name: str) -> Told:
    """On one process: the losses, and the parameters after all updates but the last have used gradients one step old."""
    model, _ = make(name, torch.float64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, before = [], None
    for batch in batches(prepared):
        optimizer.zero_grad()
        with LiftedCasts():
            loss = loss_of(model(**batch))
            loss.backward()
        losses.append(loss.item())
        now = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
        for key, parameter in model.named_parameters():
            parameter.grad = before[key] if before else None
        optimizer.step()
        before = now
    for key, parameter in model.named_parameters():
        parameter.grad = before[key] if before else None
    optimizer.step()
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def run_windows(text: str, state: dict[str, Tensor], given: list[dict[str, Tensor]], rate: float) -> tuple[Any, ...]:
    """On a rank: losses as they come, the loss of a look without gradients, and everything at the end."""
    from autopar.program.build import load
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    made: Any = load(text).Program
    parallel = Parallel(made(MeshHandle(made.mesh_axes)), state)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=rate)
    losses = []
    for step, batch in enumerate(given):
        optimizer.zero_grad()
        loss = parallel(**batch)
        loss.backward()
        losses.append(loss.item())
        if step == 2:
            with torch.no_grad():
                look = parallel(**given[0]).item()
        optimizer.step()
    optimizer.zero_grad()
    loss = parallel.flush()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    return losses, look, parallel.full_state()


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(("stages", "data"), [(2, 1), (2, 2), (4, 1)])
def test_one_step_behind(model: str, stages: int, data: int, ranks: Ranks) -> None:
    prepared = prepare(model, batch=16)
    candidate = piped(prepared, {"dp": data}, Pipeline(stages, weight_versions=2), 4)
    losses, parameters = delayed(prepared, model)
    found = ranks.run(run_windows, text_of(prepared, candidate), prepared.state, batches(prepared), RATE, world=stages * data)
    for told, _, state in found:
        assert told[0] == 0.0
        assert told[1:] == pytest.approx(losses, rel=1e-9)
        mine = {name: state[name] for name in parameters}
        assert not differences((0.0, {}, mine, {}), (0.0, {}, parameters, {}), 1e-9)
    assert len({look for _, look, _ in found}) == 1


def test_what_it_takes() -> None:
    prepared = prepare("gpt2", batch=16)
    with pytest.raises(PlanError, match="at least 4 micro-batches"):
        text_of(prepared, piped(prepared, {}, Pipeline(4, weight_versions=2), 2))
    with pytest.raises(PlanError, match="1f1b with one chunk"):
        text_of(prepared, piped(prepared, {}, Pipeline(2, 1, "gpipe", weight_versions=2), 4))
    candidate = piped(prepared, {"dp": 2, "zero": 3}, Pipeline(2, weight_versions=2), 4)
    with pytest.raises(PlanError, match="whole state"):
        text_of(prepared, candidate)
    again = replace(candidate, blocks=tuple(replace(plan, zero=0, recompute=True) for plan in candidate.blocks))
    with pytest.raises(PlanError, match="no recomputation"):
        text_of(prepared, again)
