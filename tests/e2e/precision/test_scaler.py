"""``torch.amp.GradScaler`` on real ranks: an overflow in one rank's part of one gradient skips the step on all of them, as it
does on one process, and the scale is the same everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.harness.comparison import different_numbers
from support.harness.rank_pool import RankPool
from support.models.habit_model import batch, net
from support.models.routed_mlp import RoutedMlp, routed_batch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar

STEPS, SPOILT = 5, 2


def routed() -> nn.Module:
    torch.manual_seed(0)
    return RoutedMlp().double()


def tokens(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made = routed_batch(8)
    return {name: x.double() if x.is_floating_point() else x for name, x in made.items()}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], str]] = {
    "dp=4,zero=3": (net, batch, "layers.1.up.weight"),
    "dp=2,tp=2": (net, batch, "layers.0.up.weight"),
    "tp=4": (net, batch, "layers.0.down.weight"),
    "pp=2,dp=2": (net, batch, "layers.1.down.bias"),
    "pp=2,tp=2": (net, batch, "layers.0.norm.weight"),
    "ep=2,dp=2": (routed, tokens, "down"),
    "ep=4": (routed, tokens, "up"),
    "pp=2,dp=2 of which one stage is frozen": (lambda: frozen(), batch, "layers.0.up.bias"),
    "pp=2,dp=2 of which one stage has another dtype": (lambda: mixed(), batch, "layers.0.up.bias"),
    "pp=2,dp=2 of which one stage is bare": (lambda: bare(), batch, "layers.0.up.bias"),
}
KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "groups": lambda model: torch.optim.AdamW(groups(model), lr=0.01),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Made by name: all of them are empty on a stage without parameters."""
    named = dict(model.named_parameters())
    decayed = {name: parameter for name, parameter in named.items() if parameter.dim() > 1}
    rest = [parameter for name, parameter in named.items() if name not in decayed]
    return [{"params": list(decayed.values()), "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def frozen() -> nn.Module:
    """Only its first layer trains."""
    model = net()
    model.requires_grad_(False)
    model.layers[0].requires_grad_(True)
    return model


class Up(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class Still(nn.Module):
    """Without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x.unsqueeze(2) * x.unsqueeze(1), 2)
        return torch.tanh((scores @ x.unsqueeze(2)).squeeze(2))


class Mixed(nn.Module):
    """Of two layers, the second in float32, or without parameters."""

    def __init__(self, *, bare: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Up(), Still() if bare else Up()]).double()
        self.other = torch.float64 if bare else torch.float32
        self.layers[1].to(self.other)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        h = self.layers[1](h.to(self.other))
        return (h.double().sum(1) * ids).pow(2).mean()


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed(bare=False)


def bare() -> nn.Module:
    torch.manual_seed(0)
    return Mixed(bare=True)


def spoil(gradient: torch.Tensor, rank: int) -> None:
    """One element of the whole, which one rank has, or the replicas of one."""
    if not isinstance(gradient, DTensor):
        gradient.view(-1)[-1] = torch.inf
    elif torch.distributed.get_rank() == rank:
        gradient.to_local().view(-1)[-1:] = torch.inf


def run(model: Any, make_batch: Callable[[int], Any], name: str, kind: str, *, unscale: bool, rank: int = 3) -> list[float]:
    """Losses and scales."""
    optimizer = KINDS[kind](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    said: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**make_batch(step))
        scaler.scale(loss).backward()
        spoilt = dict(model.named_parameters()).get(name)
        if step == SPOILT and spoilt is not None:
            spoil(spoilt.grad, rank)
        if unscale:
            scaler.unscale_(optimizer)
            clip = getattr(model, "clip_grad_norm_", partial(torch.nn.utils.clip_grad_norm_, model.parameters()))
            clip(0.5)
        scaler.step(optimizer)
        scaler.update()
        said += [float(loss.detach()), scaler.get_scale()]
    with torch.no_grad():
        return [*said, float(model(**make_batch(9)))]


def compare(case: str, kinds: tuple[str, ...]) -> None:
    make, make_batch, name = CASES[case]
    with warnings.catch_warnings(action="ignore"):
        parallel = autopar.parallelize(make(), "local:4", make_batch(0), force=case.split()[0], cache=False)
    start = make().state_dict()
    holding: list[Any] = [None] * 4
    torch.distributed.all_gather_object(holding, name in parallel.state.parameters)
    last = max(rank for rank in range(4) if holding[rank])
    held: list[Any] = [None] * 4
    torch.distributed.all_gather_object(held, sorted({str(p.dtype) for p in parallel.state.parameters.values()}))
    assert not case.endswith("dtype") or held[0] and held[3] and held[0] != held[3], held
    assert not case.endswith("bare") or held.count([]) == 2, held
    for kind in kinds:
        for unscale in (False, True):
            expected = run(make(), make_batch, name, kind, unscale=unscale)
            assert expected[2 * SPOILT + 1] < expected[2 * SPOILT - 1], "the single process halves its scale"
            parallel.load_state_dict(start)
            found = run(parallel, make_batch, name, kind, unscale=unscale, rank=last)
            tolerance = 1e-5 if "dtype" in case else 1e-9
            assert not (wrong := different_numbers("loss", found, expected, tolerance)), (case, kind, unscale, wrong)


QUICK = ("dp=2,tp=2", "ep=2,dp=2", "pp=2,dp=2 of which one stage is frozen", "pp=2,dp=2 of which one stage is bare")


@pytest.mark.parametrize("case", QUICK)
def test_an_overflow_on_one_rank_skips_the_step_on_all(case: str, ranks: RankPool) -> None:
    ranks.run(compare, case, ("sgd",))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_overflow_of_every_optimizer(case: str, ranks: RankPool) -> None:
    ranks.run(compare, case, tuple(KINDS), timeout=200)
