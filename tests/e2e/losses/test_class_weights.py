"""The sum of class weights over the labels is known before the first micro-batch: they are a buffer, which no program writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import full_gradients
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.program.build import prove_program


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.body(x)))
        smooth = nn.functional.cross_entropy(scores, y, weight=self.weight, label_smoothing=0.1)
        return smooth + nn.functional.cross_entropy(scores, y, weight=self.weight, ignore_index=2)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(0, 5, (8,), generator=generator)}


def losses(model: Any, other_weights: Tensor) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        if step == 1:
            model.weight.copy_(other_weights)
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    with torch.no_grad():
        found.append(model(**batch(3)))
    return found


def weighted(plan: str) -> None:
    torch.manual_seed(0)
    plain = Weighted().double()
    plain_batch = {name: each.double() if each.is_floating_point() else each for name, each in batch(0).items()}
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", plain_batch, force=plan, cache=False)
    assert parallel.program.micro_batches > 1 and parallel.program.totals
    torch.set_default_dtype(torch.float64)
    try:
        found, expected = (losses(model, torch.arange(1.0, 6.0)) for model in (parallel, plain))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("plan", ["dp=2,micro=2", "dp=1,pp=2,micro=4"])
def test_weights_of_classes(ranks: RankPool, plan: str) -> None:
    ranks.run(weighted, plan, world=2)


@pytest.mark.parametrize("plan", ["dp=2,micro=2", "dp=1,pp=2,micro=4"])
def test_their_programs_are_proven(plan: str) -> None:
    found = autopar.plan(Weighted(), "local:2", batch(0), force=plan)
    certificate = prove_program(found)
    assert certificate.holds, certificate.line()


class Layers(nn.Module):
    """With weights of classes in an attribute, which are constants of the program, as those of a loss_fn are."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count))
        self.head, self.weight = nn.Linear(6, 5), torch.linspace(0.5, 2.0, 5)

    def scores(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.scores(x), y, weight=self.weight)


class Scores(Layers):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.scores(x)


class Masked(Layers):
    """Labels and their mask are computed before the layers, and read after them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        labels = y.clamp(max=3)
        mask = (labels != 2).to(x.dtype)
        losses = nn.functional.cross_entropy(self.scores(x), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()


class EachClass(nn.BCEWithLogitsLoss):
    def forward(self, scores: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(scores, nn.functional.one_hot(y, 5).float())


def constant_weights(degrees: str, count: int) -> None:
    """On a rank."""
    weights = torch.tensor([0.3, 2.0, 1.0, 0.7, 4.0])
    outside = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)
    each_class = EachClass(weights, pos_weight=weights.flip(0))
    for kind, loss_fn in ((Layers, None), (Masked, None), (Scores, outside), (Scores, each_class)):
        torch.manual_seed(0)
        plain = kind(count)
        example = tuple(batch(0).values())
        parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", example, force=degrees, loss_fn=loss_fn, cache=False)
        for step in range(2):
            x, y = batch(step).values()
            loss, expected = parallel(x, y), plain(x, y) if loss_fn is None else loss_fn(plain(x), y)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(full_gradients(parallel), full_gradients(plain), rtol=1e-5, atol=1e-6)
            parallel.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("degrees", ["dp=2,micro=2", "dp=1,pp=2,micro=4"])
def test_constant_weights_of_classes(ranks: RankPool, degrees: str) -> None:
    """In a model of three layers, whose blocks are equal, and in one that is a single block."""
    for count in (3, 1):
        ranks.run(constant_weights, degrees, count, world=2)


class Spectral(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


def test_a_buffer_that_is_updated_once_a_forward() -> None:
    for force in ("pp=2", "dp=2,micro=2"):
        with pytest.raises(AutoparError, match=r"updates the buffer head\w*_u once a forward, which would be once a micro-batch"):
            autopar.plan(Spectral(), "local:2", batch(0), force=force)
