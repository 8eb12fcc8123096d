"""What a script does around the calls of a parallel model, with their results: right, or refused in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.harness.habits import refusal
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(8) % 4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.down(self.norm(self.up(x)))
        return out if y is None else F.cross_entropy(out, y)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6, bias=False), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))  # type: ignore[no-any-return]


def both(model: nn.Module, force: str, **example: Tensor) -> tuple[nn.Module, nn.Module]:
    """A parallel model and the same on one process."""
    torch.manual_seed(0)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    plain = type(model)().double()
    plain.load_state_dict(model.state_dict())
    return autopar.parallelize(model, "local:2", example, force=force, cache=False), plain


def same_gradients(parallel: nn.Module, plain: nn.Module) -> None:
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def checkpoint_around(force: str) -> None:
    """It recomputes nothing: its early stop leaves collectives half done."""
    parallel, plain = both(Norm(), force, x=X)
    for model in (parallel, plain):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).square().mean().backward()
    same_gradients(parallel, plain)
    before = torch.arange(36.0).double().view(6, 6).requires_grad_()

    def among_layers(model: nn.Module, x: Tensor) -> Tensor:
        return model(x @ before.tanh()).tanh().square().mean()  # type: ignore[no-any-return]

    for model in (parallel, plain, parallel, plain):
        checkpoint(among_layers, model, X, use_reentrant=False).backward()
    same_gradients(parallel, plain)
    masked, _ = both(Masked(), force, x=X)  # linear in its weight
    loss = checkpoint(masked, X.clone().requires_grad_(), use_reentrant=False).sum()
    loss.backward()
    weight = masked.get_parameter("linear.weight")
    torch.testing.assert_close((weight.grad.full_tensor() * weight.full_tensor()).sum(), loss)
    loss = checkpoint(masked, X.clone().requires_grad_(), use_reentrant=True).sum()
    assert "pass use_reentrant=False" in refusal(loss.backward)


def seed_before_calls(force: str) -> None:
    """By ``torch.manual_seed``, also of each rank, before `parallelize` and after; and by `reseed`, whatever else is seeded."""
    masks = []
    for seed in (7, 8, 7):
        torch.manual_seed(seed + dist.get_rank())
        parallel = autopar.parallelize(Masked().double(), "local:2", (X,), force=force, cache=False)
        with torch.no_grad():
            parallel.get_parameter("linear.weight").fill_(1.0)
            masks.append(parallel(X))
            parallel(X)
            torch.manual_seed(seed + dist.get_rank())
            masks.append(parallel(X))
    first, same, other, _, repeated, _ = masks
    assert torch.equal(first, same) and torch.equal(first, repeated) and not torch.equal(first, other)
    for seed in (1, 2):
        torch.manual_seed(seed)
        parallel.reseed(3)
        masks.append(parallel(X).detach())
        assert not torch.equal(masks[-1], parallel(X).detach())
    assert torch.equal(masks[-1], masks[-2])


def seeds_of_an_evaluation(force: str) -> None:
    """In a generator whose state is put back: the training goes on with other masks."""
    torch.manual_seed(3)
    parallel = autopar.parallelize(Masked().double(), "local:2", (X,), force=force, cache=False)
    masks = [parallel(X).detach() for _ in range(2)]
    for evaluates in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if evaluates:
                torch.rand(2)
                parallel(X)
        masks.append(parallel(X).detach())
        state = torch.get_rng_state()
        torch.manual_seed(0)
        torch.set_rng_state(state)
        masks.append(parallel(X).detach())
    assert not any(torch.equal(one, two) for at, one in enumerate(masks) for two in masks[:at])


def resume_with_seeds(force: str, folder: str) -> None:
    """A run that is loaded goes on with the masks of the one that was saved, before its first call or between others."""

    def begun() -> autopar.Parallel:
        torch.manual_seed(5 + dist.get_rank())
        model = Masked().double()
        nn.init.ones_(model.linear.weight)
        return autopar.parallelize(model, "local:2", (X,), force=force, cache=False)

    for calls in (0, 2, 3):
        parallel = begun()
        for _ in range(calls):
            parallel(X)
        if calls == 3:  # the next call would follow it
            torch.manual_seed(8 + dist.get_rank())
        parallel.save(f"{folder}/{calls}", step=calls)
        expected = [parallel(X).detach()]
        torch.manual_seed(6)
        expected.append(parallel(X).detach())
        resumed = begun()
        resumed.load(f"{folder}/{calls}")
        assert torch.equal(resumed(X), expected[0])
        torch.manual_seed(6)
        assert torch.equal(resumed(X), expected[1])
        seeded = begun()
        seeded.load(f"{folder}/{calls}")
        torch.manual_seed(6)
        assert torch.equal(seeded(X), expected[1])


def anomalies(force: str) -> None:
    """``torch.autograd.detect_anomaly``: torch looks for no numbers in gradients, which are DTensors."""
    parallel, plain = both(Norm(), force, x=X, y=Y)
    for model in (parallel, plain):
        with torch.autograd.detect_anomaly(check_nan=True):
            model(X, Y).backward()
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
    assert any(parameter.grad is not None for parameter in parallel.parameters())


def losses_of_ranks(force: str) -> None:
    parallel, _ = both(Norm(), force, x=X, y=Y)
    (parallel(X, Y) * (1 + dist.get_rank())).backward()
    assert "leave factors of a rank out" in refusal(lambda: parallel(X, Y))
    parallel, plain = both(Norm(), force, x=X)
    for model in (parallel, plain):
        (model(X) * (1 + 1e-9 * dist.get_rank())).square().mean().backward()  # kernels round so
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-6, atol=1e-9)
    torch.manual_seed(dist.get_rank())
    (parallel(X) * torch.rand(8, 1)).sum().backward()
    assert "without the rank" in refusal(lambda: parallel(X))


def step_between(force: str) -> None:
    """Also of an optimizer whose parameters the loss does not reach."""
    parallel, plain = both(Norm(), force, x=X, y=Y)
    loss = parallel(X, Y)
    parallel(X.flip(0), Y).backward()
    torch.optim.SGD(parallel.parameters(), 1.0).step()
    assert "call backward before the step" in refusal(loss.backward)
    parallel, plain = both(Heads(), force, x=X)
    for model in (parallel, plain):
        one, two = model(X)
        one.square().mean().backward()
        torch.optim.SGD(model.get_submodule("one").parameters(), 1.0).step()
        two.square().mean().backward()
    same_gradients(parallel, plain)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


@pytest.mark.parametrize("force", ["dp=2,tp=1,zero=3", "dp=2,tp=1,zero=0", "tp=2,dp=1"])
@pytest.mark.parametrize(
    "case",
    [checkpoint_around, seed_before_calls, seeds_of_an_evaluation, losses_of_ranks, step_between],
    ids=lambda case: case.__name__,
)
def test_around_calls(case: Callable[[str], None], force: str, ranks: RankPool) -> None:
    ranks.run(case, force, world=2)


@pytest.mark.parametrize("force", ["dp=2,tp=1,zero=3", "tp=2,dp=1"])
def test_resume_with_seeds(force: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(resume_with_seeds, force, str(tmp_path), world=2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("force", ["dp=2,tp=1,zero=3", "tp=2,dp=1", "pp=2,dp=1"])
def test_anomalies(force: str, ranks: RankPool) -> None:
    ranks.run(anomalies, force, world=2)
