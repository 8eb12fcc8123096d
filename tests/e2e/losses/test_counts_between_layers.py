"""Numbers of the whole batch that are computed before or between the layers: micro-batches and stages share them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from torch import Tensor, nn

import autopar


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if mask is None else x * mask[:, :, None]
        return x + self.outer(self.inner(x).relu())  # type: ignore[no-any-return]


class Counted(nn.Module):
    """A language model whose loss is of the tokens that a mask counts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


class MaskOfAttention(Counted):
    """The mask is read by each layer, and counted by the loss."""

    def forward(self, ids: Tensor) -> Tensor:
        mask, x = (ids > 7).double(), self.words(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return (self.token_losses(x, ids) * mask).sum() / mask.sum()


class CountBefore(Counted):
    """The number of tokens is known before the layers."""

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 7).double()
        count, x = mask.sum(), self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return (self.token_losses(x, ids) * mask).sum() / count


class CountReadTwice(Counted):
    """The number of tokens divides the loss of each of two heads, which stand between layers, and is read by both."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 7).double()
        count, x = mask.sum(), self.words(ids)
        for layer in self.layers[:2]:
            x = layer(x)
        loss = (self.early(x).logsumexp(-1) * mask).sum() / count
        for layer in self.layers[2:]:
            x = layer(x)
        return loss + (self.token_losses(x, ids) * mask).sum() / count


class CountAdded(Counted):
    """The count divides the loss, and is a term of it too: of each micro-batch its own part."""

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 7).double()
        count, x = mask.sum(), self.words(ids)
        for layer in self.layers:
            x = layer(x)
        own = (ids < 30).double().sum()
        return ((self.token_losses(x, ids) * mask).sum() + 0.1 * count + 0.2 * own) / count / own


class CountReturned(Counted):
    """The count divides what the layers get, and is returned."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        mask = (ids > 7).double()
        count = mask.sum()
        x = self.words(ids) / count
        for layer in self.layers:
            x = layer(x)
        kept = (self.token_losses(x, ids) * mask).sum()
        return {"loss": kept / count, "count": count, "twice": count * 2}


class Examples(Counted):
    """The number of examples is a sum of ones, which no input of the batch has a part in."""

    def forward(self, ids: Tensor) -> Tensor:
        count, x = torch.ones(ids.shape[0], dtype=torch.float64).sum(), self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.token_losses(x, ids).sum() / count


class SeveralTokens(Counted):
    """Layers between heads that predict further tokens (multi-token prediction): labels roll on from head to head."""

    def forward(self, ids: Tensor) -> Tensor:
        x, labels, loss = self.words(ids), ids, None
        for layer in self.layers:
            x = layer(x)
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
            term = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
            loss = term if loss is None else loss + 0.3 * term
        assert loss is not None
        return loss


MODELS = {
    kind.__name__: kind
    for kind in (MaskOfAttention, CountBefore, CountReadTwice, CountAdded, CountReturned, Examples, SeveralTokens)
}


def trains(name: str, force: str) -> None:
    """On a rank."""
    torch.manual_seed(0)
    models = [MODELS[name]().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
    ids[1, :4], ids[6, :5] = 0, 0  # the examples count differently
    outputs = ("count", "twice") if name == CountReturned.__name__ else ()
    parallel = autopar.parallelize(models[0], "local:4", {"ids": ids}, force=force, cache=False, proof=True, outputs=outputs)
    assert parallel.program.micro_batches > 1
    batches = [{"ids": ids}, {"ids": ids.roll(1, 0)[:4]}]
    found, expected = (train(each, batches) for each in (parallel, models[1]))
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for part in ("gradients", "state"):
        for key, tensor in getattr(expected, part).items():
            torch.testing.assert_close(getattr(found, part)[key], tensor, rtol=1e-9, atol=1e-11)
    for key in outputs:
        torch.testing.assert_close(parallel(ids)[key], models[1](ids)[key], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "force",
    ["pp=2,dp=2,micro=2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp=2,tp=2,micro=2", "pp=4,micro=4"))],
)
def test_numbers_of_the_whole_batch(name: str, force: str, ranks: RankPool) -> None:
    ranks.run(trains, name, force)
