"""One export serves all lengths: its graph at a length is the one that a capture at that length gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.small_models import make
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.export import Export
from autopar.capture.options import CaptureOptions
from autopar.errors import CaptureError
from autopar.ir.interface import Interface
from autopar.variants import maker
from autopar.variants.maker import Exports


class Asking(nn.Module):
    """A forward that asks about the length: it multiplies longer ones, cuts a table, divides by the length and counts places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.places = nn.Parameter(torch.zeros(64, 8))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor, weights: Tensor, pairs: bool = False) -> Tensor:
        length = x.shape[1]
        h = self.words(x) + self.places[:length]
        for layer in self.layers:
            h = h + layer(h)
        if length > 20:
            h = h * 2
        if pairs:
            h = h.view(x.shape[0], length // 2, 2, 8).mean(2).repeat_interleave(2, 1)
        places = torch.arange(length, device=x.device) / length
        return ((h * places[:, None]).sum(-1) * weights).sum() / length


def asking(size: int, length: int, **more: Any) -> dict[str, Any]:
    return dict(x=torch.zeros(size, length, dtype=torch.long), weights=torch.zeros(size, length), **more)


OPEN = {"x": (1,), "weights": (1,)}


@pytest.mark.parametrize("size,length", [(8, 16), (8, 12), (7, 20), (1, 5), (8, 2)])
def test_the_graph_is_that_of_a_capture(size: int, length: int) -> None:
    model = Asking()
    export = Export(model, (), asking(8, 16), CaptureOptions(), OPEN)
    assert export.graph_at(asking(size, length)) == capture(model, (), asking(size, length))


def test_a_length_that_the_forward_treats_otherwise_is_none_of_it() -> None:
    model = Asking()
    export = Export(model, (), asking(8, 16), CaptureOptions(), OPEN)
    for length in (1, 21, 64, 65):
        assert export.graph_at(asking(8, length)) is None
    uneven = asking(8, 16)
    uneven["weights"] = torch.zeros(8, 1)
    assert export.graph_at(uneven) is None, "one of two equal lengths alone"
    longer = Export(model, (), asking(8, 24), CaptureOptions(), OPEN)
    assert longer.graph_at(asking(8, 64)) == capture(model, (), asking(8, 64)) and longer.graph_at(asking(8, 16)) is None
    in_pairs = Export(model, (), asking(8, 16, pairs=True), CaptureOptions(), OPEN)
    assert in_pairs.graph_at(asking(8, 15)) is None
    assert in_pairs.graph_at(asking(8, 14)) == capture(model, (), asking(8, 14, pairs=True))


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "encoder_decoder")), "gpt2", "convnet"]
)
def test_families(name: str) -> None:
    """Each dimension that is not the batch is open, and cut; of images, which the model flattens, none stays open."""
    model, whole = make(name, torch.float32)
    dims = {key: tuple(range(1, x.dim())) for key, x in whole.items() if not name.startswith("conv") or key == "pixels"}
    export = Export(model, (), whole, CaptureOptions(), {key: each for key, each in dims.items() if each})
    lengths = sorted({x.shape[1] for x in whole.values() if x.dim() > 1})
    for cut in (1, 5):
        inputs = {key: x[:, : x.shape[1] - cut] if x.dim() == 2 and x.shape[1] in lengths else x for key, x in whole.items()}
        if name.startswith("conv"):
            assert export.graph_at(inputs) is None or export.graph_at(inputs) == capture(model, (), inputs)
        else:
            assert export.graph_at(inputs) == capture(model, (), inputs)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def export(*args: Any) -> Export:
        made.append(args)
        return Export(*args)

    monkeypatch.setattr(maker, "Export", export)
    return made


def test_sixteen_lengths_are_one_export(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = Asking(), counted(monkeypatch)
    kept = Exports({"x": ("B", 16), "weights": ("B", 16)})
    for length in range(3, 19):
        for size in (8, 7):
            graph = kept.graph(model, (True,), asking(size, length), CaptureOptions())
            assert graph.batch == size and graph.inputs[0].shape == ("B", length)
            assert length not in (5, 18) or graph == capture(model, (), asking(size, length))
    assert len(made) == 1
    for length in (21, 30, 40):  # the other branch: an export of its own
        assert kept.graph(model, (True,), asking(8, length), CaptureOptions()) == capture(model, (), asking(8, length))
    assert len(made) == 2
    changed = kept.graph(model, (True,), asking(8, 16, pairs=True), CaptureOptions())
    assert isinstance(changed.interface, Interface) and len(made) == 3, "another constant is another structure"
    with pytest.raises(CaptureError):
        kept.graph(model, (True,), asking(8, 65), CaptureOptions())


@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_the_last_batch_of_an_epoch_is_no_further_export(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = Tail(loss), counted(monkeypatch)
    kept = Exports({"x": ("B", 4)})
    for size in (8, 7, 1, 16):
        inputs = {"x": torch.zeros(size, 4)}
        assert kept.graph(model, (True,), inputs, CaptureOptions()) == capture(model, (), inputs)
    assert len(made) == 1
    inputs = {"x": torch.zeros(33, 4)}
    assert kept.graph(model, (True,), inputs, CaptureOptions()) == capture(model, (), inputs)
    assert len(made) == 2, "the other branch"


class Tail(nn.Module):
    """The batch as a number, and a branch on it."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y if x.shape[0] <= 32 else y * 2
        return y.mean() if self.loss == "mean" else y.square().sum() / x.shape[0]


class Scale:
    """An argument that is no plain constant: its text does not tell two of them apart."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Scale) -> Tensor:
        return (x * scale.factor).sum()


def test_constants_are_compared_themselves() -> None:
    model, kept = Scaled(), Exports({"x": ("B", 4)})
    for length, scale in ((5, Scale(2.0)), (6, Scale(3.0)), (7, Scale(4.0))):
        inputs = {"x": torch.zeros(8, length), "scale": scale}
        assert kept.graph(model, (True,), inputs, CaptureOptions()) == capture(model, (), inputs)


class Fixed(nn.Module):
    """The length as a number: no export holds for another one."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.full((int(x.shape[1]),), 2.0, device=x.device)).sum() * float(x.shape[1]) ** 0.5


def test_a_forward_that_fixes_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = Fixed(), counted(monkeypatch)
    kept = Exports({"x": ("B", 4)})
    for length in (4, 5, 6, 5):
        inputs = {"x": torch.zeros(8, length)}
        assert kept.graph(model, (True,), inputs, CaptureOptions()) == capture(model, (), inputs)
    assert len(made) >= 4
