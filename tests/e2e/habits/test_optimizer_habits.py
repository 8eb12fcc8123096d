"""Habits around optimizers (docs/habits.md), on real ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from support.harness.comparison import different_numbers, different_tensors
from support.harness.habits import (  # noqa: F401
    equals_one_process,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
)
from support.models.habit_model import batch, net
from torch import Tensor


def optimizer_after(plan: str) -> None:
    equals_one_process(parallel_of(net(), plan), net())


def optimizer_before(plan: str) -> str:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = parallel_of(model, plan)
    one_step(parallel)
    said = refusal(optimizer.step)
    del parallel
    gc.collect()
    optimizer.step()  # the hook is gone with the parallel model
    return said


def optimizer_before_with_closure(plan: str) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallel_of(model, plan)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = parallel(**batch())
        loss.backward()
        return loss

    return refusal(lambda: optimizer.step(closure))


def plain_model_beside(plan: str) -> None:
    model = net()
    equals_one_process(parallel_of(model, plan), model)


def zero_redundancy_optimizer(plan: str) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    parallel = parallel_of(net(), plan)

    def step() -> None:
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=1e-2)
        one_step(parallel)
        optimizer.step()

    return refusal(step)


# -- kinds of optimizers


def steps_of(model: Any, make: Callable[[Any], Any], count: int = 3) -> list[float]:
    """Losses of some steps, each with a closure as LBFGS wants it."""
    optimizer, losses = make(model), []
    for seed in range(count):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**batch(seed))
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return losses


def same_steps(plan: str, *makes: Callable[[Any], Any], tolerance: float = 1e-9) -> None:
    """Losses and parameters of a few steps equal one process's, with each of the optimizers."""
    parallel, start = parallel_of(net(), plan), net().state_dict()
    for make in makes:
        reference = net()
        parallel.load_state_dict(start)
        found, expected = steps_of(parallel, make), steps_of(reference, make)
        state = parallel.full_state()
        wrong = different_numbers("loss", found, expected, tolerance)
        parameters = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        wrong += different_tensors("parameter", {name: state[name] for name in parameters}, parameters, tolerance)
        assert not wrong, (make(reference), wrong[:3])


def sgd(plan: str) -> None:
    same_steps(plan, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1))


def adam_kinds(plan: str) -> None:
    same_steps(
        plan,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
        lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    )


def other_optimizers(plan: str) -> None:
    same_steps(
        plan,
        lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, fused=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, centered=True),
        lambda m: torch.optim.Adadelta(m.parameters(), lr=0.1),
    )


def rprop(plan: str) -> None:
    def make(**options: Any) -> Callable[[Any], Any]:
        return lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2, **options)

    same_steps(plan, make(), make(foreach=True))


def adafactor(plan: str) -> None:
    same_steps(plan, lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2))


def matrices(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def muon(plan: str) -> None:
    """By hand, and torch's, which works in bfloat16: the same to 1e-9 since one rank sums whole matrices in the same order."""
    same_steps(plan, lambda m: Orthogonal(matrices(m)), lambda m: torch.optim.Muon(matrices(m), lr=1e-2))


class Orthogonal(torch.optim.Optimizer):
    """Muon by hand."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95)
                x = x.mT if p.size(0) > p.size(1) else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x.mT if p.size(0) > p.size(1) else x, alpha=-group["lr"])
        return loss


class Trust(torch.optim.Optimizer):
    """LARS and LAMB by hand: steps as long as the norms of parameter and gradient say, as numbers, tensors or lists of them."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if self.kind == "lists":
                norms, steepnesses = torch._foreach_norm(trained), torch._foreach_norm([p.grad for p in trained])
                for p, norm, steepness in zip(trained, norms, steepnesses, strict=True):
                    p.add_(p.grad * (norm / (steepness + 1e-6)), alpha=-group["lr"])
                continue
            for p in trained:
                if self.kind == "numbers":
                    size, steep = p.data.norm().item(), torch.norm(p.grad.data).item()
                    ratio = size / (steep + 1e-8) if size and steep else 1.0
                    p.data.add_(p.grad.data, alpha=-group["lr"] * ratio)
                else:
                    norm, steepness = p.norm(), p.grad.norm()
                    ratio = torch.where(steepness > 0, norm / (steepness + 1e-6), torch.ones_like(norm))
                    p.add_(p.grad * ratio, alpha=-group["lr"])
        return loss


def norms_by_hand(plan: str) -> None:
    same_steps(plan, *(lambda m, kind=kind: Trust(m.parameters(), kind) for kind in ("numbers", "tensors", "lists")))


def lbfgs(plan: str) -> None:
    def make(model: Any) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    same_steps(plan, make)


def groups_and_schedules(plan: str) -> None:
    """Weight decay for matrices, none for the rest, by name for the embedding; a schedule of the rate and of the momentum."""

    def run(model: Any) -> list[float]:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if p.ndim >= 2 and "words" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.ndim >= 2 and "words" in n], "weight_decay": 0.1, "lr": 3e-2},
            {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        schedules: list[Any] = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        ]
        losses = []
        for seed in range(4):
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch(seed))
            loss.backward()
            optimizer.step()
            schedules[seed // 2].step()
            losses.append(float(loss.detach()))
        return losses

    parallel, reference = parallel_of(net(), plan), net()
    assert not different_numbers("loss", run(parallel), run(reference), 1e-9)
    state = parallel.full_state()
    for name, parameter in reference.named_parameters():
        if name != "unused":
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-9)


def scaler(plan: str) -> None:
    """Also where a gradient of one parameter, of one stage, is not finite: no rank takes the step."""

    def run(model: Any, enabled: bool) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scale = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=4.0, growth_interval=100)
        for seed in range(3):
            optimizer.zero_grad()
            scale.scale(model(**batch(seed))).backward()
            spoilt = dict(model.named_parameters()).get("layers.1.down.bias")
            if enabled and seed == 1 and spoilt is not None:
                spoilt.grad.mul_(float("inf"))
            scale.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scale.step(optimizer)
            scale.update()
        return [float(model(**batch(5)).detach()), float(scale.get_scale())]

    parallel, start = parallel_of(net(), plan), net().state_dict()
    for enabled in (False, True):
        parallel.load_state_dict(start)
        assert not (wrong := different_numbers("loss", run(parallel, enabled), run(net(), enabled), 1e-9)), (enabled, wrong)
