"""A padding mask that is read by the position of each example (as transformers' mask functions do) is cut into micro-batches."""

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
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, rows, columns = self.words(ids), torch.arange(ids.shape[0]), torch.arange(ids.shape[1])
        mask = attention_mask.bool()[rows[:, None, None, None], columns[None, None, None, :]]
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def trains(force: str) -> None:
    """On a rank."""
    torch.manual_seed(0)
    models = [Padded().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[6, :2] = 0, 0
    given = {"ids": ids, "attention_mask": mask}
    parallel = autopar.parallelize(models[0], "local:4", given, force=force, cache=False)
    assert parallel.program.micro_batches > 1
    found, expected = train(parallel, [given] * 3), train(models[1], [given] * 3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("force", ["pp=2,dp=2", pytest.param("tp=2,dp=2,micro=1", marks=pytest.mark.slow)])
def test_a_padding_mask_is_cut(force: str, ranks: RankPool) -> None:
    ranks.run(trains, force)


class LocalLayer(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, torch.where(mask, 0.0, -9.0).to(x.dtype))


class Local(Padded):
    """Its mask has the batch, and is made of no input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LocalLayer() for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        x, columns = self.words(ids), torch.arange(ids.shape[1])
        mask = ((columns[None, :] - columns[:, None]).abs() < 3).expand(ids.shape[0], 1, -1, -1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def trains_in_smaller_batches() -> None:
    """On a rank."""
    torch.manual_seed(0)
    models = [Local().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
    parallel = autopar.parallelize(models[0], "local:2", {"ids": ids}, force="pp=2", cache=False)
    assert parallel.program.micro_batches > 1
    batches = [{"ids": ids[:size]} for size in (8, 4, 8)]
    found, expected = train(parallel, batches), train(models[1], batches)
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)


def test_a_mask_of_the_batch_has_the_size_of_each_batch(ranks: RankPool) -> None:
    """Stages that made it themselves had the plan's number of examples."""
    ranks.run(trains_in_smaller_batches, world=2)
