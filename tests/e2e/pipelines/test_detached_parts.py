"""A part that the forward detaches has no gradients on a pipeline, as on one process: None, which AdamW leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, train
from torch import Tensor, nn

import autopar


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())  # type: ignore[no-any-return]


class Probe(nn.Module):
    """Layers, of which the later ones alone are trained by this loss; `skip` hands an earlier result past the detach."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.body = nn.ModuleList(Block() for _ in range(3))
        self.head, self.skip = nn.Linear(16, 8), skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = x
        for number, layer in enumerate(self.encoder):
            x = layer(x)
            kept = x if number == 0 else kept
        x = x.detach()
        for layer in self.body:
            x = layer(x)
        return F.cross_entropy(self.head(x + kept if self.skip else x), y)


def trains(force: str, skip: bool) -> None:
    """On a rank."""
    torch.manual_seed(0)
    models = [Probe(skip).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    source = torch.Generator().manual_seed(1)
    given = {
        "x": torch.randn(8, 16, dtype=torch.float64, generator=source),
        "y": torch.randint(0, 8, (8,), generator=source),
    }
    parallel = autopar.parallelize(models[0], "local:4", given, force=force, cache=False, proof=True)
    found, expected = (train(each, [given] * 3, adamw(0.1)) for each in (parallel, models[1]))
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-11)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("skip", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "force", ["pp=2,dp=2,micro=2", pytest.param("pp=4,micro=4", marks=SLOW), "pp=2,virtual=2,schedule=zbv,dp=2,micro=1"]
)
def test_what_is_detached_is_left_alone(force: str, skip: bool, ranks: RankPool) -> None:
    ranks.run(trains, force, skip)
