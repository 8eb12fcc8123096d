"""Habits of precision (docs/habits.md, docs/precision.md), on real ranks. `tests/e2e/precision` has more."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.harness.comparison import different_numbers
from support.harness.habits import cluster, parallel_of, refusal, test_habit, test_habit_under_other_plans  # noqa: F401
from support.models.habit_model import batch, net
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import autopar


def scaler_of_some_ranks(plan: str) -> None:
    def run(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        said = []
        for seed in range(3):
            optimizer.zero_grad()
            scaler.scale(model(**batch(seed))).backward()
            gradient = next(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
            if seed == 1 and not (isinstance(gradient, DTensor) and dist.get_rank()):
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.view(-1)[:1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            said += [scaler.get_scale(), float(model(**batch(5)).detach())]
        return said

    assert not (wrong := different_numbers("loss", run(parallel_of(net(), plan)), run(net()), 1e-9)), wrong


def autocast(plan: str) -> None:
    """float64 is not cast; what is cast is in `tests/e2e/precision`."""
    parallel, plain = parallel_of(net(), plan), net()
    for dtype in (torch.bfloat16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            found, expected = parallel(**batch()), plain(**batch())
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=0)


def autocast_on_some_ranks(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    with torch.autocast("cpu", enabled=dist.get_rank() == 1):
        return refusal(lambda: parallel(**batch()))


def float8(plan: str) -> str:
    return refusal(lambda: autopar.parallelize(net(), cluster(), batch(), precision="fp8"))


def reduce_dtype(plan: str) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    parallel, plain = autopar.parallelize(net(), cluster(), batch(), precision=policy, force="tp=1", cache=False), net()
    (loss := parallel(**batch())).backward()
    (expected := plain(**batch())).backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    found = parallel.full_gradients()
    used = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    for name, gradient in used.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    assert not all(torch.equal(found[name], gradient) for name, gradient in used.items()), "it rounds"


def precision_beside_plan(plan: str) -> str:
    return refusal(lambda: parallel_of(net(), plan, precision="bf16"))


def force_beside_plan(plan: str) -> str:
    return refusal(lambda: parallel_of(net(), plan, force="tp=4"))
