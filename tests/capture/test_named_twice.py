"""What modules do with their own tensors in a forward: name parameters and buffers twice, move them, read constants, leave a
layer unread."""

from __future__ import annotations

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError


class NamedTwice(nn.Module):
    """Parameters in a dictionary and in a list too, as liquid nets keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 4))
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.named = {"up": self.up, "scale": self.scale, "power": 2}
        self.listed = [self.down, 3.0]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.listed
        h = (x @ self.named["up"] * self.named.get("scale")).relu() ** self.named["power"]
        return (h @ first / second).square().sum() + sum(value.sum() for key, value in self.named.items() if key == "up")


class Moves(nn.Module):
    """Moves a part of itself to the device where it is, as mixtures of experts do that keep some on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.expert.to("cpu")
        return self.expert.to(x.device)(x).square().sum()


class KnownValues(nn.Module):
    """Reads, in Python, what no input decides: as solvers of differential equations and fields of labels do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 5, dtype=x.dtype)
        steps = times[1:] - times[:-1]
        assert (steps > 0).all()
        steps[0] = 2 * steps[1]
        written = times.clone().fill_(3.0)
        for step in steps:
            x = x + step * self.inner(x).tanh() * written[0]
        x = x + x.repeat_interleave(torch.tensor([1, 0, 2, 1]), dim=1) + x.repeat_interleave(torch.tensor([3]), 1)[:, 8:]
        mask = torch.ones_like(x, dtype=torch.uint8)
        if not mask[0].all():
            x = x * 100
        return torch.where(mask[:, :1], x, -x).square().sum() * int(times.sum())


class ReadsWhatItWrote(nn.Module):
    """What an input was written into is known no longer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        flag = torch.zeros(1, dtype=x.dtype)
        view = flag[:1]
        flag += x.sum()
        return self.inner(x).sum() * (2 if view > 0 else 3)


@pytest.mark.parametrize("model_class", [NamedTwice, Moves, KnownValues])
def test_the_model_is_captured_as_it_runs(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = model_class().double(), torch.randn(6, 4).double()
    if isinstance(model, NamedTwice):
        model.named |= {"scale": model.scale}
    check_captured(capture(model, (x,)), model, {"x": x}, rtol=1e-7, atol=1e-7)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_an_input_decides_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_named_twice.py:\d+.*depends on the data of a tensor"):
        capture(ReadsWhatItWrote(), (torch.randn(6, 4),))


class Deeper(nn.Module):
    """Computes deeper features than anything reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features[-1]))
        return features[2].square().sum()


def test_a_layer_that_only_moves_its_statistics_has_a_result() -> None:
    graph = capture(Deeper(), (torch.randn(6, 4),))
    assert all(call.outputs for call in graph.calls)
    assert "layers.2.1.running_mean" in graph.parameters()


class SharedNorm(nn.Module):
    """Has one batch norm in two layers, and a buffer under two names, both of which the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.BatchNorm1d(4), "linear": nn.Linear(4, 4)}) for _ in range(5))
        self.layers[3]["norm"] = self.layers[1]["norm"]
        self.register_buffer("total", torch.zeros(4))
        self.layers[0].register_buffer("seen", self.total)

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].seen.add_(x.detach().mean(0))
        for layer in self.layers:
            x = x + layer["linear"](layer["norm"](x).tanh())
        x = x + self.total
        self.total.mul_(0.5)
        return x.square().mean()


def train_shared_norm(force: str) -> None:
    torch.manual_seed(0)
    plain = SharedNorm().double()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    batches = [torch.randn(8, 4).double() for _ in range(6)]
    parallel = autopar.parallelize(plain, "local:2", (batches[0],), force=force, cache=False)
    reference = SharedNorm().double()
    reference.load_state_dict(state)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (parallel, reference)]
    for number, batch in enumerate(batches):
        losses = []
        for model, optimizer in zip((parallel, reference), optimizers, strict=True):
            losses.append(model.train(number % 3 < 2)(batch))
            if model.training:
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
    expected = reference.state_dict()
    torch.testing.assert_close(dict(parallel.full_state()), dict(expected), rtol=1e-9, atol=1e-12)
    assert set(parallel.state_dict()) == set(expected)


@pytest.mark.parametrize("force", ["dp=2,zero=3", "tp=2"])
def test_a_norm_of_two_layers_is_that_of_one_process(force: str, ranks: RankPool) -> None:
    """Each of its calls was taken for a write into a view of the other's buffers, and refused without a place."""
    ranks.run(train_shared_norm, force, world=2)
