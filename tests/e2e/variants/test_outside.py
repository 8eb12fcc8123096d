"""Losses outside of the program: what the model returns takes gradients, and inputs get them, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients, same_state
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

CLUSTER = "local:4"


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)).double()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def criterion(force: str) -> None:
    """The commonest style of all, over three steps of AdamW."""
    torch.manual_seed(0)
    plain = mlp(8, 5)
    parallel = autopar.parallelize(plain, CLUSTER, (randn(8, 8),), force=force, cache=False)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (parallel, plain)]
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    for size in (8, 6, 8):
        target = torch.arange(size) % 5
        for model, optimizer in zip((parallel, plain), optimizers, strict=True):
            optimizer.zero_grad()
            result = model(randn(size, 8, seed=size))
            assert type(result) is Tensor and result.shape == (size, 5)
            (loss_of(result, target) + 0.01 * result.square().mean()).backward()
            optimizer.step()
    same_state(parallel, plain)


def adversarial(force: str) -> None:
    """Two models and one loss; gradients into inputs, through a frozen model; two calls before a backward."""
    torch.manual_seed(0)
    makers, judges = mlp(8, 16), mlp(16, 1)
    pairs = [(makers, judges)]
    generator = autopar.parallelize(makers, CLUSTER, (randn(8, 8),), force=force, cache=False)
    judge = autopar.parallelize(judges, CLUSTER, (randn(8, 16),), force=force, cache=False, beside=generator, proof=True)
    predicted = generator.plan.document.predicted
    held = judge.plan.document.cluster.description["device"]["held_bytes"]
    assert held == predicted.peak_memory_bytes - predicted.memory["base"]
    pairs.insert(0, (generator, judge))
    losses = []
    for make, decide in pairs:
        fake, real = make(randn(8, 8)), randn(8, 16, seed=1)
        first = nn.functional.softplus(-decide(real)).mean() + nn.functional.softplus(decide(fake.detach())).mean()
        first.backward()
        second = nn.functional.softplus(-decide(fake)).mean()
        second.backward()
        losses.append((first.item(), second.item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    same_gradients(generator, makers)
    same_gradients(judge, judges)
    inputs = [randn(8, 16).requires_grad_() for _ in pairs]
    for (_, decide), x in zip(pairs, inputs, strict=True):
        decide(x).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-9, atol=1e-11)
    with pytest.raises(AutoparError, match="gradients of gradients"):
        torch.autograd.grad(judge(inputs[0]).sum(), inputs[0], create_graph=True)
    same_gradients(judge, judges)
    judge.requires_grad_(False)
    for make, decide in pairs:
        decide(make(randn(8, 8))).mean().backward()
    same_gradients(generator, makers)
    assert all(parameter.grad is None for parameter in judge.parameters())


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(8, 4), mlp(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "a": self.a(x).square().mean(),
            "b": self.b(x).square().sum(),
            "hidden": self.a[0](x),
            "best": self.a(x).argmax(-1),
        }


def several_losses(force: str) -> None:
    torch.manual_seed(0)
    plain = Several().double()
    parallel = autopar.parallelize(plain, CLUSTER, {"x": randn(8, 8)}, force=force, cache=False)
    for model in (parallel, plain):
        found = model(x=randn(8, 8))
        (found["a"] + 0.1 * found["b"]).backward()
    same_gradients(parallel, plain)
    results = [model(x=randn(8, 8)) for model in (parallel, plain)]
    for result in results:
        result["hidden"].sum().backward()
    same_gradients(parallel, plain)
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


class Scored(nn.Module):
    """With a loss, and logits beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def loss_function(force: str) -> None:
    """`loss_fn` puts the loss into the program: names of parameters stay, and without a target the result comes back."""
    torch.manual_seed(0)
    plain, loss_of = nn.Sequential(*(mlp(16, 16) for _ in range(4)), nn.Linear(16, 5)).double(), nn.CrossEntropyLoss()
    target = torch.arange(8) % 5
    parallel = autopar.parallelize(plain, CLUSTER, (randn(8, 16), target), loss_fn=loss_of, force=force, cache=False)
    assert set(dict(parallel.named_parameters())) <= set(dict(plain.named_parameters()))
    for size in (8, 5):
        x, y = randn(size, 16), target[:size]
        for given in ((x, y), (x,)):
            loss, expected = parallel(*given, **({} if len(given) > 1 else {"target": y})), loss_of(plain(x), y)
            loss.backward()
            expected.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
            same_gradients(parallel, plain)
        with torch.no_grad():
            torch.testing.assert_close(parallel(x), plain(x), rtol=1e-9, atol=1e-11)


def outputs_beside(force: str) -> None:
    """Full tensors on every rank, of every stage; a gradient into them is refused with the way to ask for it."""
    torch.manual_seed(0)
    plain = Scored().double()
    example = {"x": randn(8, 16), "y": torch.arange(8) % 5}
    parallel = autopar.parallelize(plain, CLUSTER, example, outputs=("logits",), force=force, cache=False)
    for size in (8, 7):
        given = {"x": randn(size, 16), "y": torch.arange(size) % 5}
        found, expected = parallel(**given), plain(**given)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-9, atol=1e-11)
        for each in (found, expected):
            each["loss"].backward()
        same_gradients(parallel, plain)
        with pytest.raises(AutoparError, match='outputs=."logits:gradient",'):
            parallel(**given)["logits"].sum().backward()
        parallel.zero_grad()


def loss_outside_of_a_pipeline(force: str) -> None:
    """On a pipeline, before anything is planned."""
    with pytest.raises(AutoparError, match="from a loss outside of the program .*take pp=1"):
        autopar.parallelize(mlp(8, 5), CLUSTER, (randn(8, 8),), force=force, cache=False)


def penalty_outside(force: str) -> None:
    """A term of the parameters is a DTensor: as such it is refused, as a full tensor it is right."""
    torch.manual_seed(0)
    plain, loss_of, target = mlp(8, 5), nn.CrossEntropyLoss(), torch.arange(8) % 5
    parallel = autopar.parallelize(plain, CLUSTER, (randn(8, 8),), force=force, cache=False)
    terms = [sum((p**2).sum() + 0.1 * p.abs().sum() for p in model.parameters()) for model in (parallel, plain)]
    with pytest.raises(AutoparError, match="add term.full_tensor"):
        (loss_of(parallel(randn(8, 8)), target) + 1e-2 * terms[0]).backward()
    parallel.zero_grad()
    losses = [
        loss_of(parallel(randn(8, 8)), target) + 1e-2 * terms[0].full_tensor(),
        loss_of(plain(randn(8, 8)), target) + 1e-2 * terms[1],
    ]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-9)
    same_gradients(parallel, plain)


FORCES = [
    "dp=2,tp=2,zero=3",
    *(pytest.param(force, marks=pytest.mark.slow) for force in ("dp=4,zero=3", "tp=4", "dp=2,tp=2,zero=0", "")),
]
STAGED = ["pp=2,dp=2", pytest.param("pp=2,tp=2,micro=2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize(
    "check",
    [criterion, adversarial, several_losses, loss_function, outputs_beside, penalty_outside],
    ids=lambda check: check.__name__,
)
def test_losses_outside(check: Any, force: str, ranks: RankPool) -> None:
    ranks.run(check, force)


@pytest.mark.parametrize("force", STAGED)
@pytest.mark.parametrize("check", [loss_function, outputs_beside, loss_outside_of_a_pipeline], ids=lambda check: check.__name__)
def test_losses_of_pipelines(check: Any, force: str, ranks: RankPool) -> None:
    ranks.run(check, force)
