"""A batch at dimension 1 (sequence first): symbolic, cut by the data axis; said with `batch_dim`, or read from sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.bind import batch_dims_of
from autopar.errors import AutoparError, CaptureError

LENGTH, WIDTH, CLASSES = 5, 12, 6


class Recurrent(nn.Module):
    """One label for each sequence: sizes tell the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.lstm(x)[0][-1]), y)


class Encoder(nn.Module):
    """One label for each position: nothing tells the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, norm_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Pooled(Encoder):
    """One label for each sequence."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(0)), y)


def example(kind: type[nn.Module], size: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(LENGTH, size, WIDTH, dtype=torch.float64, generator=generator)
    shape = (LENGTH, size) if kind is Encoder else (size,)
    return {"x": x, "y": torch.randint(CLASSES, shape, generator=generator)}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def said(kind: type[nn.Module]) -> Any:
    return 1 if kind is Encoder else None


def trained(kind: type[nn.Module], degrees: str, sizes: tuple[int, ...]) -> None:
    plain = made(kind)
    parallel = autopar.parallelize(plain, "local:4", example(kind, 8), force=degrees, cache=False, batch_dim=said(kind))
    for number, size in enumerate(sizes):
        losses = []
        for model in (parallel, plain):
            loss = model(**example(kind, size, number))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        same_gradients(parallel, plain)
        for parameter in (*parallel.parameters(), *plain.parameters()):
            parameter.grad = None


@pytest.mark.parametrize(
    ("kind", "degrees", "sizes"),
    [
        (Recurrent, "dp=4", (8, 4, 7)),
        pytest.param(Encoder, "dp=2,tp=2", (8, 4, 7), marks=pytest.mark.slow),
        pytest.param(Encoder, "dp=4,zero=3", (8, 12, 7), marks=pytest.mark.slow),
        pytest.param(Pooled, "pp=2,dp=2,micro=2", (8, 12), marks=pytest.mark.slow),
        pytest.param(Recurrent, "dp=2,micro=2", (8, 12), marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(kind: type[nn.Module], degrees: str, sizes: tuple[int, ...], ranks: RankPool) -> None:
    ranks.run(trained, kind, degrees, sizes)


@pytest.mark.parametrize("kind", [Recurrent, Encoder])
def test_it_is_symbolic_and_said(kind: type[nn.Module]) -> None:
    graph = capture(made(kind), (), example(kind, 8), batch_dim=said(kind))
    assert graph.batch_is_symbolic and graph.batch == 8
    assert graph.inputs[0].shape == ("B", LENGTH, WIDTH)
    assert any(note.startswith("the batch is dimension 1 of x") for note in graph.notes), graph.notes
    other = capture(made(kind), (), example(kind, 6), batch_dim=said(kind))
    assert other.fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"x": (8, 3), "y": (8,)}, {}),
        ({"x": (5, 8, 3), "y": (8,)}, {"x": 1}),
        ({"x": (5, 8, 3), "y": (8,), "z": (8, 2)}, {"x": 1}),
        ({"source": (5, 8, 3), "target": (7, 8, 3)}, {"source": 1, "target": 1}),
        ({"x": (5, 8, 3), "state": (1, 8, 4)}, {"x": 1, "state": 1}),
        ({"x": (8, 5, 3), "state": (2, 8, 4)}, {"state": 1}),
        ({"x": (5, 8, 3), "y": (5, 8)}, {}),
        ({"x": (8, 16), "table": (16, 8)}, {}),
        ({"x": (8, 4), "y": (8,), "table": (3, 8)}, {}),
    ],
)
def test_what_sizes_say(shapes: dict[str, tuple[int, ...]], expected: dict[str, int]) -> None:
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    assert batch_dims_of(tensors, {name: name for name in shapes}, None) == expected


def test_what_cannot_be_is_refused() -> None:
    model, batch = made(Encoder), example(Encoder, 8)
    with pytest.raises(CaptureError, match="batch_dim names z, which is no input: write one of x, y"):
        capture(model, (), batch, batch_dim={"z": 1})
    with pytest.raises(CaptureError, match=r"batch_dim=2 of y: it has shape \(5, 8\)"):
        capture(model, (), batch, batch_dim={"y": 2})


class Positions(nn.Module):
    """A batch of ids, and the positions of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.positions = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return (self.ids(ids) + self.positions(positions)).square().mean()


def test_a_batch_that_was_guessed_and_does_not_divide() -> None:
    inputs = {"ids": torch.zeros(4, LENGTH, dtype=torch.int64), "positions": torch.arange(LENGTH)}
    with pytest.raises(AutoparError, match="the batch was taken to be dimension 1 of ids, .* pass batch_dim=0"):
        autopar.plan(Positions(), "local:2", inputs, force="dp=2")
    assert autopar.plan(Positions(), "local:2", inputs, force="dp=2", batch_dim=0).graph.batch == 4
