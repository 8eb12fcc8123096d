"""What scripts do with the list of all parameters, on every rank of a pipeline, against one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness.comparison import different_numbers
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.runtime.compat.dtensor import local_of
from autopar.runtime.state.stage_tensors import OnAnotherStage

Script = Callable[[Any], list[float]]


class Words(nn.Module):
    """Has a tied matrix and buffers on the first and the last stage, and parameters that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        layers = ((nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in layers)
        self.spare = nn.Linear(4, 4)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.register_buffer("slope", torch.full((8,), 2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x) + self.shift
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(h * self.slope).flatten(0, 1), y.flatten())


class Scaled(nn.Module):
    """A module of the user's around a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.inner(**batch) * self.scale
        return loss


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 12, (8, 5), generator=generator) for name in "xy"}


def steps(model: Any, optimizer: Any, before: Callable[[], Any] = lambda: None, count: int = 2) -> list[float]:
    """The losses, and the norms of all parameters, of a few steps."""
    losses = []
    for _ in range(count):
        loss = model(**batch())
        loss.backward()
        before()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *(p.norm().item() for p in model.parameters())]


def by_position(model: Any) -> list[float]:
    layers = [{"params": [p], "lr": 0.01 * 0.9**place} for place, p in enumerate(model.parameters())]
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in words().parameters()]
    return steps(model, torch.optim.AdamW(layers))


def frozen_by_position(model: Any) -> list[float]:
    first = list(model.parameters())[:6]
    for p in first:
        p.requires_grad_(False)
    found = steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for p in first:
        p.requires_grad_(True)
    return found + steps(model, torch.optim.SGD(model.parameters(), lr=0.1))


def numbers_one_by_one(model: Any) -> list[float]:
    numbers: list[float] = []

    def note() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        numbers.extend([sum(g.norm().item() ** 2 for g in gradients), max(g.abs().max().item() for g in gradients)])
        numbers.append(torch.stack(torch._foreach_norm(gradients, float("inf"))).max().item())
        numbers.extend([(g * g).sum(0).max().item() + g.sum().item() + g.mean(0).sum().item() for g in gradients])
        numbers.append(float(any((g.abs() > 0.05).any() for g in gradients)))
        numbers.append(torch.nn.utils.clip_grad_norm_(list(model.parameters())[2:], 0.05).item())

    return steps(model, torch.optim.AdamW(model.parameters(), foreach=True), note) + numbers


def penalties(model: Any) -> list[float]:
    optimizer, totals = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        total = model(**batch()) + 0.01 * sum(p.square().sum() for p in model.parameters())
        total = total + 0.01 * model.words.weight.abs().sum()
        total = total + 0.01 * (model.blocks[3][0].weight * model.blocks[3][1].weight).square().sum()
        total.backward()
        totals += [total.item(), *(p.grad.norm().item() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return totals


def lbfgs(model: Any) -> list[float]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch())
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(2)]


def averages(model: Any) -> list[float]:
    plain, average = words(), torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        steps(model, optimizer, count=1)
        average.update_parameters(model)
        with torch.no_grad():
            for mean, p in zip(plain.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
    return [float(average(**batch())), *(p.detach().norm().item() for p in plain.parameters())]


def draws(model: Any) -> list[float]:
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    nn.init.orthogonal_(model.blocks[3][1].weight)
    return [*torch.rand(2).tolist(), model(**batch()).item(), *(p.norm().item() for p in model.parameters())]


def state_in_a_file(model: Any) -> list[float]:
    optimizer, file = torch.optim.AdamW(model.parameters()), io.BytesIO()
    found = steps(model, optimizer)
    torch.save(optimizer.state_dict(), file)
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return found + steps(model, again)


def inside_of_another(model: Any) -> list[float]:
    outer = Scaled(model)
    assert len(list(outer.parameters())) == len(list(words().parameters())) + 1
    return steps(outer, torch.optim.AdamW(outer.parameters()))


def full_states(model: Any) -> list[float]:
    """Those of the optimizer, in an order of the script's own, also into a plain model's and back."""
    groups = [{"params": list(model.parameters())[::-2]}, {"params": list(model.parameters())[-2::-2], "lr": 0.05}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    found = steps(model, optimizer)
    if hasattr(model, "full_optimizer_state"):
        state = model.full_optimizer_state(optimizer)
        model.load_full_optimizer_state(optimizer, copy.deepcopy(state))
    else:
        state = optimizer.state_dict()
    sizes = [float(values["exp_avg"].norm()) for _, values in sorted(state["state"].items())]
    return found + sizes + steps(model, optimizer)


def data_of_others(model: Any) -> list[float]:
    """Values of one stage in the place of those of another: of parameters, of copies, of gradients."""
    model(**batch()).backward()
    first, last = model.blocks[0][1], model.blocks[3][1]
    kept = first.weight.detach().clone()
    kept.data = last.weight.data
    first.bias.data, last.bias.data = last.bias.data.clone(), first.bias.data.clone()
    first.weight.grad.data = last.weight.grad.data * 0.5
    return [kept.norm().item(), first.weight.grad.norm().item(), *(p.norm().item() for p in model.parameters())]


def state_dicts(model: Any) -> list[float]:
    """Read, averaged, changed in place, given to another layer, to a plain model and back."""
    average = copy.deepcopy(model.state_dict())
    found = steps(model, torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        for value in model.state_dict().values():
            value.mul_(1.5)
    found += [value.norm().item() for value in (*average.values(), *model.state_dict().values())]
    model.blocks[3].load_state_dict(model.blocks[0].state_dict())
    plain = words()
    plain.load_state_dict(model.state_dict())
    found += [float(each.norm()) for each in plain.state_dict().values()] + steps(model, torch.optim.SGD(model.parameters(), 0.1))
    partly = {**model.state_dict(), **{name: 2.0 * each for name, each in plain.blocks.state_dict(prefix="blocks.").items()}}
    model.load_state_dict(partly)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(average)
    return found + steps(model, torch.optim.SGD(model.parameters(), 0.1))


def buffers(model: Any) -> list[float]:
    """Read by attribute and by name, written in place and assigned."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = [model.shift.mean().item(), model.slope.sum().item(), *(each.norm().item() for _, each in model.named_buffers())]
    model.slope.mul_(0.5).add_(model.shift)
    found += steps(model, optimizer)
    model.shift = torch.linspace(0.0, 1.0, 8, dtype=torch.float64)
    model.slope = model.slope + model.blocks[0][0].weight.detach()
    model.slope.data = model.shift.data * 2.0
    model.shift.data *= 0.5
    kept = model.slope.detach().clone()
    kept.data = model.shift.data * 3.0
    found.append(kept.norm().item())
    others = copy.deepcopy(list(model.parameters()))
    for each in others:
        each.data = each.data * 2.0  # which leaves the model's as they are
    found += [each.norm().item() for each in others]
    return found + steps(model, optimizer) + [each.norm().item() for each in model.buffers()]


def several_backwards(model: Any) -> list[float]:
    """Weights of two losses by the norms of their gradients (GradNorm), and a loss that goes back twice, and half."""
    weight = model.blocks[0][1].weight
    losses = [model(**batch()), model(**batch()) * 0.5]
    norms = [torch.autograd.grad(each, weight, retain_graph=True)[0].norm().item() for each in losses]
    sum(each * norm for each, norm in zip(losses, norms, strict=True)).backward()
    loss = model(**batch())
    loss.backward(retain_graph=True)
    kept = weight.grad.clone()
    (loss * 0.5).backward()
    return [*norms, kept.norm().item(), *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)]


SCRIPTS: tuple[Script, ...] = (
    *(by_position, frozen_by_position, numbers_one_by_one, penalties, lbfgs, averages, draws, state_in_a_file),
    *(inside_of_another, full_states, data_of_others, state_dicts, buffers, several_backwards),
)


def run_scripts(force: str) -> list[str]:
    world = torch.distributed.get_world_size()
    parallel: Any = autopar.parallelize(words(), f"local:{world}", batch(), force=force, cache=False)
    wrong = []
    for script in SCRIPTS:
        parallel.load_full_state(words().state_dict())
        parallel.zero_grad()
        if differs := different_numbers(script.__name__, script(parallel), script(words()), 1e-9):
            wrong.append(str(differs))
    return wrong


@pytest.mark.parametrize(
    "force", ["pp=2,dp=1", *(pytest.param(f"pp=2,{each}", marks=pytest.mark.slow) for each in ("dp=2,zero=3", "tp=2"))]
)
def test_scripts_over_all_parameters(force: str, ranks: RankPool) -> None:
    world = 2 if force == "pp=2,dp=1" else 4
    assert ranks.run(run_scripts, force, world=world, timeout=300.0) == [[]] * world


def elements() -> tuple[int, int, int]:
    """How many parameters are of other stages, the elements of AdamW's state for them here, and the largest tensor that a step
    fetches."""
    parallel: Any = autopar.parallelize(words(), "local:2", batch(), force="pp=2,dp=1", cache=False)
    optimizer, fetched = torch.optim.AdamW(parallel.parameters(), foreach=False), [0]
    usual = torch.distributed.broadcast

    def broadcast(tensor: Tensor, *args: Any, **options: Any) -> Any:
        fetched.append(tensor.numel())
        return usual(tensor, *args, **options)

    torch.distributed.broadcast = broadcast
    try:
        steps(parallel, optimizer, lambda: torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0))
    finally:
        torch.distributed.broadcast = usual
    away = [p for p in parallel.parameters() if isinstance(p, OnAnotherStage)]
    kept = sum(local_of(each).numel() for p in away for each in optimizer.state[p].values() if each.dim())
    return len(away), kept, max(fetched)


def test_other_stages_take_no_memory(ranks: RankPool) -> None:
    count = len(list(words().parameters()))
    for away, kept, largest in ranks.run(elements, world=2):
        assert away > 5 and kept == 0 and 1 < largest <= count
