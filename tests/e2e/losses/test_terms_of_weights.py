"""Losses with terms and factors of weights alone, in micro-batches: learned weights of tasks, penalties in a forward; and with
numbers: one minus a similarity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients
from support.harness.habits import refusal
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

Loss = Callable[["Tasks", Tensor, Tensor, Tensor], Tensor]
X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(8) % 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.linear(x)) * self.scale, penalty + self.scale.abs().sum()


class Tasks(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.classes, self.value, self.log = nn.Linear(6, 4), nn.Linear(6, 1), nn.Parameter(torch.tensor([0.3, -0.2]))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, penalty = x, self.log.new_zeros(())
        for layer in self.layers:
            hidden, penalty = layer(hidden, penalty)
        one, two = F.cross_entropy(self.classes(hidden), y, ignore_index=3), self.value(hidden).square().mean()
        return self.loss(self, one, two, penalty)


def learned_weights(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    return torch.exp(-model.log[0]) * one + model.log[0] + torch.exp(-model.log[1]) * two + model.log[1]


def deviations(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    widths = F.softplus(model.log)
    return one / (2 * widths[0] ** 2) + two / widths[1] + widths.log().sum()


def penalty_in_forward(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    return one + two + 1e-2 * sum(p.square().sum() for p in model.classes.parameters())


def penalty_of_layers(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    return one + 0.1 * penalty * two.detach().new_ones(()) + model.log.norm()


def numbers(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    return (1 - two) * 2 + (one - 0.25) + 3


def guard(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(model.log.sum() > 0, one + two, two * 0)


def logarithm(model: Tasks, one: Tensor, two: Tensor, penalty: Tensor) -> Tensor:
    return torch.log(one) + model.log.sum()


def train(loss: Loss, force: str) -> int:
    torch.manual_seed(0)
    plain = Tasks(loss).double()
    parallel: Any = autopar.parallelize(
        copy.deepcopy(plain), f"local:{torch.distributed.get_world_size()}", (X, Y), force=force, cache=False, proof=True
    )
    for x, y in ((X, Y), (X.flip(0) * 2, Y.flip(0))):
        found, expected = parallel(x, y), plain(x, y)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        found.backward()
        expected.backward()
        same_gradients(parallel, plain)
    with torch.no_grad():
        torch.testing.assert_close(parallel(X, Y), plain(X, Y), rtol=1e-9, atol=1e-9)
    count: int = parallel.program.micro_batches
    return count


@pytest.mark.parametrize("force", ["pp=2,dp=1", "pp=2,dp=2,micro=2", "dp=2,micro=1,zero=3", "tp=2,dp=1,micro=2"])
@pytest.mark.parametrize("loss", [learned_weights, deviations, penalty_in_forward, penalty_of_layers, numbers, guard])
def test_equals_one_process(ranks: RankPool, loss: Loss, force: str) -> None:
    assert min(ranks.run(train, loss, force, world=4 if "pp=2,dp=2" in force else 2)) > 1


def test_functions_of_the_loss_take_one_micro_batch() -> None:
    plan = lambda: autopar.plan(Tasks(logarithm).double(), "local:2", (X, Y), force="pp=2,dp=1,micro=2")  # noqa: E731
    assert "aten.log" in refusal(plan)


class Supervised(nn.Module):
    """A loss of each head, which ignores labels of its own; `carried`: each is added to a number that went through the layers."""

    def __init__(self, heads: int, carried: bool) -> None:
        super().__init__()
        self.layers, self.carried = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), carried
        every = [nn.Sequential(nn.Linear(6, 4)), nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(6, 4)]
        self.heads = nn.ModuleList(every[:heads])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(()) if self.carried else 0
        for layer in self.layers:
            x = layer(x)
            total = total + 0.1 * x.square().mean() if self.carried else total
        for at, head in enumerate(self.heads):
            total = total + F.cross_entropy(head(x), y[:, at], ignore_index=3)
        return total


class MaskedLayer(nn.Module):
    """Hands on a loss of its own, of the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x = x + torch.tanh(self.linear(x))
        counts = (y[:, 1] < 3).to(x.dtype)
        total = total + (x.square().mean(1) * counts).sum() / counts.sum()
        return x, total + F.cross_entropy(self.head(x), y[:, 0], ignore_index=3)


class Deep(nn.Module):
    """Equal layers, each with the numbers of its loss; the first value of what they add to is a mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(MaskedLayer() for _ in range(4)), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.square().mean()
        for layer in self.layers:
            x, total = layer(x, y, total)
        return F.cross_entropy(self.head(x), y[:, 2], ignore_index=3) + total


class Logged(nn.Module):
    """A loss whose parts are logged, with a term that no gradient flows into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        one, two = F.cross_entropy(logits, y[:, 0], ignore_index=3), x.square().mean()
        with torch.no_grad():
            right = ((logits.argmax(-1) == y[:, 0]) * (y[:, 0] < 3)).to(x.dtype).sum() / (y[:, 0] < 3).sum()
        return {"loss": one + two + 0.5 * (right - one.detach()), "one": one.detach(), "right": right}


def logged(force: str) -> None:
    torch.manual_seed(0)
    plain, y = Logged().double(), torch.arange(24).reshape(8, 3) % 4
    parallel: Any = autopar.parallelize(
        copy.deepcopy(plain), "local:2", (X, y), force=force, cache=False, outputs=("one", "right"), proof=True
    )
    found, expected = parallel(X, y), plain(X, y)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)
    found["loss"].backward()
    expected["loss"].backward()
    same_gradients(parallel, plain)


@pytest.mark.parametrize("force", ["pp=2,dp=1", "dp=2,micro=2"])
def test_parts_of_a_loss_are_logged(ranks: RankPool, force: str) -> None:
    ranks.run(logged, force, world=2)


SUPERVISED: dict[str, Callable[[], nn.Module]] = {
    "two heads": lambda: Supervised(2, False), "heads": lambda: Supervised(3, False), "carried": lambda: Supervised(3, True),
    "layers": Deep,
}  # fmt: skip


def train_supervised(kind: str, force: str) -> int:
    torch.manual_seed(0)
    plain = SUPERVISED[kind]().double()
    y = torch.tensor([[0, 3, 3], [1, 3, 2], [2, 1, 3], [0, 3, 3], [3, 3, 3], [1, 3, 0], [2, 3, 3], [0, 3, 3]])
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", (X, y), force=force, cache=False, proof=True)
    for labels in (y, y.flip(0, 1)):
        found, expected = parallel(X, labels), plain(X, labels)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        found.backward()
        expected.backward()
        same_gradients(parallel, plain)
    count: int = parallel.program.micro_batches
    return count


@pytest.mark.parametrize("force", ["pp=2,dp=1", "dp=2,micro=1"])
@pytest.mark.parametrize("kind", SUPERVISED)
def test_each_head_has_its_own_number_of_labels(ranks: RankPool, kind: str, force: str) -> None:
    assert min(ranks.run(train_supervised, kind, force, world=2)) > 1
