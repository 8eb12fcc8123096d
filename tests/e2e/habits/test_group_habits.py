"""Habits around optimizers of some parameters, numbers of all of them, and full states of torch (docs/habits.md), on ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.harness.comparison import different_numbers, same_state
from support.harness.habits import (  # noqa: F401
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    under,
)
from support.models.habit_model import batch, net
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

Wanted = Callable[[str, nn.Parameter], bool]


def some(model: nn.Module, wanted: Wanted) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if wanted(name, parameter)]


def losses_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[float]:
    losses = []
    for seed in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(**batch(seed))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def first_layer(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("layers.0")


def filtered_parameters(plan: str) -> None:
    """Of one layer, which one stage of a pipeline has: adapters, one part that trains. Its full state is that of one process."""
    parallel, reference = parallel_of(net(), plan), net()
    mine, theirs = (torch.optim.AdamW(some(model, first_layer), lr=1e-2) for model in (parallel, reference))
    assert not (wrong := different_numbers("loss", losses_of(parallel, mine), losses_of(reference, theirs), 1e-9)), wrong
    found, expected = parallel.full_optimizer_state(mine), theirs.state_dict()
    assert found["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for number, values in expected["state"].items():
        torch.testing.assert_close(found["state"][number]["exp_avg"], values["exp_avg"], rtol=1e-9, atol=1e-11)
    parallel.load_full_optimizer_state(mine, expected)
    more = losses_of(parallel, mine), losses_of(reference, theirs)
    assert not (wrong := different_numbers("loss", *more, 1e-9)), wrong


def two_optimizers(plan: str) -> None:
    """Matrices of the layers by one optimizer, the rest by another, as with Muon beside AdamW."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        def hidden(name: str, parameter: nn.Parameter) -> bool:
            return name.startswith("layers") and parameter.dim() == 2

        rest = some(model, lambda name, parameter: not hidden(name, parameter))
        return [torch.optim.SGD(some(model, hidden), lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]

    parallel, reference = parallel_of(net(), plan), net()
    found, expected = losses_of(parallel, *make(parallel)), losses_of(reference, *make(reference))
    assert not (wrong := different_numbers("loss", found, expected, 1e-9)), wrong
    muon = torch.optim.Muon(some(parallel, lambda name, parameter: first_layer(name, parameter) and parameter.dim() == 2))
    one_step(parallel)
    muon.step()


@under("pp=2,dp=2")
def optimizers_by_turns(plan: str) -> None:
    """One for each half of the parameters by turns, of which a stage may have none, then one for each parameter, evaluations in
    between, and steps that are left out: no rank has made another number of steps than it should."""

    def run(model: Any) -> list[float]:
        first = torch.optim.SGD(some(model, first_layer), lr=0.1)
        rest = torch.optim.AdamW(some(model, lambda name, parameter: not first_layer(name, parameter)), lr=1e-2)
        rates = torch.optim.lr_scheduler.StepLR(rest, 2)
        losses = []
        for seed, optimizers in enumerate(([first], [rest], [first, rest, rest], [], [rest], [first])):
            loss = model(**batch(seed))
            loss.backward()
            with torch.no_grad():
                losses.append(model(**batch(seed + 1)).item())
            for optimizer in optimizers:
                optimizer.step()
            rates.step()
            if seed % 2:
                first.zero_grad()
                rest.zero_grad()
        single = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        return losses + losses_of(model, *single)

    assert not (wrong := different_numbers("loss", run(parallel_of(net(), plan)), run(net()), 1e-9)), wrong


def _without_bad_steps(model: Any, is_bad: Callable[[list[nn.Parameter]], Any]) -> list[float]:
    """Losses of steps which are left out where a gradient, of one stage, is not finite."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in range(3):
        optimizer.zero_grad()
        loss = model(**batch(seed))
        loss.backward()
        spoilt = dict(model.named_parameters()).get("layers.1.down.bias")
        if seed == 1 and spoilt is not None:
            spoilt.grad.mul_(float("nan"))
        if not is_bad([p for p in model.parameters() if p.grad is not None]):
            optimizer.step()
        losses.append(loss.item())
    return losses


@under("pp=2,dp=2")
def leave_out_bad_steps(plan: str) -> None:
    def by_norm(parameters: list[nn.Parameter]) -> bool:
        return not torch.nn.utils.clip_grad_norm_(parameters, float("inf")).isfinite()

    def by_extreme(parameters: list[nn.Parameter]) -> bool:
        return bool(torch.stack([p.grad.isnan().any() for p in parameters if p.grad is not None]).any())

    def by_values(parameters: list[nn.Parameter]) -> bool:
        return any(not p.grad.isfinite().all() for p in parameters if p.grad is not None)

    for is_bad in (by_norm, by_extreme, by_values):
        found, expected = (_without_bad_steps(model, is_bad) for model in (parallel_of(net(), plan), net()))
        assert not (wrong := different_numbers("loss", found, expected, 1e-9)), wrong


@under("pp=2,dp=2")
def step_left_out_on_one_rank(plan: str) -> str:
    """Each rank decides by its number."""
    return refusal(lambda: _without_bad_steps(parallel_of(net(), plan), lambda _: dist.get_rank() == 1))


def learning_rate_of_each_rank(plan: str) -> str:
    """As of `ReduceLROnPlateau` with the loss of a rank's own examples."""
    parallel = parallel_of(net(), plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    one_step(parallel)
    optimizer.step()
    one_step(parallel)
    optimizer.param_groups[0]["lr"] /= 1 + dist.get_rank()
    optimizer.step()
    return refusal(lambda: parallel(**batch()))


def full_states_of_torch(plan: str) -> None:
    """Full states of torch.distributed.checkpoint, which another model and optimizer load on each rank or from rank 0."""
    parallel: Any = parallel_of(net(), plan)
    optimizer = torch.optim.AdamW(parallel.parameters())
    one_step(parallel)
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    model, found = get_state_dict(parallel, optimizer, options=options)
    expected = parallel.full_optimizer_state(optimizer)["state"]
    names = [name for name, _ in net().named_parameters()]
    assert sorted(found["state"]) == sorted(names[number] for number in expected)
    for number, values in expected.items():
        torch.testing.assert_close(found["state"][names[number]]["exp_avg"], values["exp_avg"])
    loaded = net()
    loaded.load_state_dict(model)
    same_state(parallel, loaded)
    for sends in (False, True):
        other: Any = parallel_of(net(), plan)
        own = torch.optim.AdamW(other.parameters())
        mine = (model, found) if not sends or dist.get_rank() == 0 else ({}, {})
        copies = [copy.deepcopy(each) for each in mine]
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends, strict=False)
        set_model_state_dict(other, copies[0], options=how)
        set_optimizer_state_dict(other, own, copies[1], options=how)
        same_state(other, loaded)
        again = other.full_optimizer_state(own)["state"]
        for number, values in expected.items():
            torch.testing.assert_close(again[number]["exp_avg"], values["exp_avg"])


def sums_over_parameters(plan: str) -> None:
    """PCGrad's products, norms and counts of what is computed of gradients and parameters, for each parameter or in one row."""

    def run(model: Any) -> list[float]:
        found = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            kept = []
            for part in (0, 5):
                optimizer.zero_grad()
                model(**batch(seed + part)).backward()
                kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            first, other = kept
            along, length = sum((x * y).sum() for x, y in zip(first, other, strict=True)), sum((x * x).sum() for x in first)
            with torch.no_grad():
                for p, x, y in zip([p for p in model.parameters() if p.grad is not None], first, other, strict=True):
                    p.grad.copy_(x + y - (along / length) * x)  # read for each parameter
            many: Any = 0
            for p in model.parameters():
                many += (p.detach() != 0).sum() if p.grad is not None else 0
            optimizer.step()
            changed = torch.stack([(p.detach().abs() * p.grad).norm() for p in model.parameters() if p.grad is not None]).norm()
            found += [float(along), length.sqrt().item(), float(many), float(changed)]
        return found

    parallel = parallel_of(net(), plan)
    assert not (wrong := different_numbers("sums", run(parallel), run(net()), 1e-9)), wrong
    for add in (lambda model: sum((p * p).sum() for p in list(model.parameters())[1:]).item(),
                lambda model: sum(((p * p).sum() for p in model.parameters()), torch.ones(())).item()):  # fmt: skip
        with torch.no_grad():
            assert not different_numbers("sums", [add(parallel_of(net(), plan))], [add(net())], 1e-9)


def sums_in_a_tensor(plan: str) -> None:
    """An L1 penalty, and a norm, that begin as ``torch.zeros(())``; the mean of one gradient's norms."""

    def run(model: Any) -> list[float]:
        penalty, total, mean = (torch.zeros(size, dtype=torch.float64) for size in ((), (1,), ()))
        loss = model(**batch(0))
        for name, p in model.named_parameters():
            penalty += p.norm(1) if name != "unused" else 0
        (loss + 0.1 * penalty).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            total += gradient.pow(2).sum()
        return [float(loss), float(penalty), float(total.sqrt()), *(float(mean.lerp_(gradients[0].norm(), 0.5)) for _ in (0, 1))]

    parallel, reference = parallel_of(net(), plan), net()
    assert not (wrong := different_numbers("sums", run(parallel), run(reference), 1e-9)), wrong
    for name, p in parallel.named_parameters():
        expected = reference.get_parameter(name).grad
        assert (p.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-9, atol=1e-11)


def order_of_all_elements(plan: str) -> None:
    """Pruning by the size of all weights, and by their effect (SNIP)."""

    def prune(model: Any, kind: int) -> float:
        own = [p for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            scores = [(p.detach().abs(), (p.grad * p).abs(), p.grad.abs())[kind] for p in own]
            least = torch.topk(torch.cat([each.flatten() for each in scores]), 300)[0][-1]
            for p, each in zip(own, scores, strict=True):
                p.mul_(each >= least)
        return float(least)

    parallel, reference = parallel_of(net(), plan), net()
    for kind in range(3):
        for model in (parallel, reference):
            one_step(model)
        assert not (wrong := different_numbers("least", [prune(parallel, kind)], [prune(reference, kind)], 1e-9)), wrong
