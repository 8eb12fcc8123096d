"""Depth costs next to nothing, and layers that are not all alike give the same plan as a capture in full."""

from __future__ import annotations

import pytest
import torch
from support.harness.processor_seconds import processor_seconds
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.convert import flatten_program
from autopar.capture.fold_layers import fold
from autopar.capture.normalize import normalize
from autopar.capture.tracing.trace import trace
from autopar.cost_models.hardware.cluster import Cluster
from autopar.program.build import program_text
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

HIDDEN = 32


class Layer(nn.Module):
    """Attention, over `window` tokens where that is set, and a feed-forward of `wide` times the width."""

    def __init__(self, window: int, wide: int) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, wide * HIDDEN), nn.Linear(wide * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        distance = torch.arange(x.shape[1], device=x.device)[:, None] - torch.arange(x.shape[1], device=x.device)
        seen = (distance >= 0) & (distance < self.window) if self.window else distance >= 0
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Layers by (window, wide)."""

    def __init__(self, kinds: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*kind) for kind in kinds)
        self.embed, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def made(kinds: list[tuple[int, int]]) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return Model(kinds), {"x": torch.empty(8, 16, HIDDEN), "target": torch.empty(8, 16, dtype=torch.int64)}


ALIKE, WINDOW, DENSE = (0, 4), (4, 4), (0, 8)


@pytest.mark.parametrize(
    "kinds",
    [[ALIKE] * 4, [ALIKE, WINDOW] * 3, [DENSE, *[ALIKE] * 3]],
    ids=["alike", "alternating windows", "a first dense layer"],
)
def test_the_same_plan_as_a_capture_in_full(kinds: list[tuple[int, int]]) -> None:
    model, inputs = made(kinds)
    graphs = []
    for outlined in (True, False):
        traced = trace(model, (), inputs, outlined=outlined)
        graphs.append(fold(model, normalize(flatten_program(traced)), traced))
    short, full = graphs
    assert short == full
    assert sorted(short.count(block.name) for block in short.blocks if block.name.startswith("Layer")) == sorted(
        kinds.count(kind) for kind in set(kinds)
    )
    options = SearchOptions(force={"dp": 4})
    first, second = (search(graph, Cluster.parse("local:4"), options) for graph in graphs)
    assert first.candidate == second.candidate
    assert first.evaluation.step_seconds == second.evaluation.step_seconds


def seconds(layers: int) -> float:
    """Processor seconds of capture, search and program text."""
    model, inputs = made([ALIKE] * layers)

    def whole() -> None:
        graph = capture(model, (), inputs)
        found = search(graph, Cluster.parse("dgx-h100:1"), SearchOptions())
        program_text(graph, found.candidate)

    return processor_seconds(whole)


def export_seconds(layers: int) -> float:
    """Processor seconds of torch's own export of the same model."""
    model, inputs = made([ALIKE] * layers)
    return processor_seconds(lambda: torch.export.export(model, (), inputs))


def test_depth_costs_little() -> None:
    """Capture, search and program text of a further layer cost a third of what torch.export alone takes for it (0.9 to 2.6 s).

    What does not grow with depth (1.1 s) is left out: a limit for the quotient of two depths rose whenever that became faster."""
    seconds(4), export_seconds(4)  # what only a first call does
    found = []
    for _ in range(3):  # a busy machine slows one of them down, but not again and again
        ours, exported = (work(126) - work(16) for work in (seconds, export_seconds))
        found.append(ours / exported)
        if found[-1] <= 0.4:
            return
    raise AssertionError(f"a further layer takes so many times the seconds of torch.export: {found}")
