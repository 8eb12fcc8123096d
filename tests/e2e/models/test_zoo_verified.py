"""`autopar verify` of both zoos, the models written after papers and those of the package index, in training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.zoo.catalog import specimen, zoo
from support.models.zoo.verified import FORCES, verdict
from support.models.zoo_index.catalog import INSTALL, installed, make, zoo_index
from torch import Tensor, nn

WHOLE_BATCH = "of the whole batch"
REFUSED: Mapping[str, str] = {
    "reformer": "custom autograd.Function",
    "fno": "is torch.complex64",
    "unet": "depends on the data of a tensor",
    "gcn": "depends on the data of a tensor",
    "gat": "depends on the data of a tensor",
    "vector_quantize": "depends on the data of a tensor",
    "tab_transformer": "depends on the data of a tensor",
    "triplets": "depends on the data of a tensor",
}
"""Models of packages that capture refuses, with why; the line names file, line and remedy."""


@pytest.mark.parametrize(("name", "force"), [("autocast", "pp=2"), ("prototypes", "dp=2,tp=2")])
def test_some_equal_one_process(name: str, force: str, ranks: RankPool) -> None:
    """Of a model that is the same in training and in evaluation, a pipeline has one plan: its blocks are those that were cut."""
    assert verdict(*specimen(name), force, ranks) == "equal"


class MovesStatistics(nn.Module):
    """Encoders of segmentation models compute deeper features than their decoder reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features[-1]))
        return features[2].square().mean()


def test_a_layer_that_only_moves_its_statistics(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = MovesStatistics().double()
    assert verdict(model, {"x": torch.randn(8, 3, 4, 4).double()}, "dp=2,tp=2", ranks) == "equal"


def agrees(found: str, force: str, reason: str) -> None:
    """Refused for this reason, else equal; a pipeline may need the whole batch, or have too few blocks."""
    if reason:
        assert found.startswith("refused: ") and reason in found
    elif force == "pp=2" and found != "equal":
        assert any(why in found for why in (WHOLE_BATCH, "blocks, pp=2", "was captured at a batch of")), found
    else:
        assert found == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("name", list(zoo()))
def test_each_written_model(name: str, force: str, ranks: RankPool) -> None:
    agrees(verdict(*specimen(name), force, ranks), force, "")


@pytest.mark.slow
@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("name", list(zoo_index()))
def test_each_model_of_the_index(name: str, force: str, ranks: RankPool) -> None:
    if not installed(name):
        pytest.skip(f"{zoo_index()[name].module} is not installed: {INSTALL}")
    agrees(verdict(*make(name, dtype=torch.float64), force, ranks), force, REFUSED.get(name, ""))
