"""A user's script with a pipeline: `parallelize` in every process, the loop as it was; and what is refused in words."""

from __future__ import annotations

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, clip_gradients, train
from torch import Tensor, nn

import autopar

WORDS, WIDTH = 50, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Words to words, the table used twice."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, WORDS, (16, 8), generator=generator) for name in ("ids", "labels")}


def train_with_clipping(model: nn.Module) -> list[float]:
    """Losses of four steps, the norms of their gradients, and the loss of an evaluation after the second."""
    numbers = []

    def evaluate(step: int) -> None:
        if step == 1:
            model.eval()
            with torch.no_grad():
                numbers.append(model(**batch()).item())
            model.train()

    losses = train(
        model, [batch()] * 4, adamw(1e-2), loss_factor=2.0,
        after_backward=lambda _: numbers.append(clip_gradients(model, 0.5).item()), after_step=evaluate,
    ).losses  # fmt: skip
    return [*losses, *numbers]


def run_script(forces: list[str]) -> list[tuple[list[float], str]]:
    """On a rank."""
    out = []
    for force in forces:
        parallel = autopar.parallelize(model(), "local:4", batch(), force=force, cache=False)
        out.append((train_with_clipping(parallel), str(dict(parallel.program.mesh_axes))))
    return out


def test_the_training_loop_is_unchanged(ranks: RankPool) -> None:
    forces = ["pp=2", "pp=4,schedule=zb-h1", "pp=2,virtual=2,schedule=zbv,dp=2,zero=3"]
    expected = train_with_clipping(model())
    for told in ranks.run(run_script, forces, timeout=120):
        for force, (losses, axes) in zip(forces, told, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9), force
            assert f"'pp': {force[3]}" in axes


@pytest.mark.parametrize(
    ("force", "said"),
    [
        ("pp=3", "does not divide"),
        ("pp=2,schedule=zigzag", "zigzag"),
        ("pp=2,micro=3", "micro"),
        ("pp=2,schedule=zbv,virtual=1", "zbv"),
    ],
)
def test_impossible_pipelines_are_refused(force: str, said: str) -> None:
    with pytest.raises(autopar.AutoparError, match=said):
        autopar.plan(model(), "local:4", batch(), force=force)


def test_more_stages_than_blocks_are_refused() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(autopar.AutoparError, match="fewer stages|stages"):
        autopar.plan(Small(), "local:8", {"x": torch.randn(8, 4)}, force="pp=8")
