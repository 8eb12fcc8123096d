"""A user's script with a pipeline: `parallelize` in every process, the loop as it was; and what is refused in words."""

from __future__ import annotations

import pytest
import torch
from support.ranks import Ranks
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


def train(parallel: nn.Module) -> list[float]:
    """Four steps, a look without gradients after the second; clipped where the model can."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = parallel(**batch())
        (2.0 * loss).backward()
        clip = getattr(parallel, "clip_grad_norm_", None)
        norm = clip(0.5) if clip else nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
        if step == 1:
            parallel.eval()
            with torch.no_grad():
                losses.append(parallel(**batch()).item())
            parallel.train()
    return losses


def run_script(forces: list[str]) -> list[tuple[list[float], str]]:
    """On a rank."""
    out = []
    for force in forces:
        parallel = autopar.parallelize(model(), "local:4", batch(), force=force, cache=False)
        out.append((train(parallel), str(dict(parallel.program.mesh_axes))))
    return out


def test_the_loop_stays(ranks: Ranks) -> None:
    forces = ["pp=2", "pp=4,schedule=zb-h1", "pp=2,virtual=2,schedule=zbv,dp=2,zero=3"]
    expected = train(model())
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
def test_what_cannot_be(force: str, said: str) -> None:
    with pytest.raises(autopar.AutoparError, match=said):
        autopar.plan(model(), "local:4", batch(), force=force)


def test_more_stages_than_blocks() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(autopar.AutoparError, match="fewer stages|stages"):
        autopar.plan(Small(), "local:8", {"x": torch.randn(8, 4)}, force="pp=8")
