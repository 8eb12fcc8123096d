"""Equal layers are traced once, with the same graph as if all were traced; what is not equal is traced in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.convert import flatten_program
from autopar.capture.fold_layers import fold
from autopar.capture.models import load_model
from autopar.capture.normalize import normalize
from autopar.capture.tracing.equal_layers import find_groups
from autopar.capture.tracing.trace import trace
from autopar.ir.graph import Graph


def captured(model: nn.Module, inputs: dict[str, Tensor], outlined: bool) -> tuple[Graph, int]:
    """The graph, and how many layers were opaque."""
    traced = trace(model, (), inputs, outlined=outlined)
    keys = [str(node.args[-1]) for node in traced.program.graph.nodes if "autopar_capture.outlined" in str(node.target)]
    opaque = sum(len(key.split(" ")[1].split(",")) for key in keys)
    return fold(model, normalize(flatten_program(traced)), traced), opaque


@pytest.mark.parametrize(
    ("name", "depth"), [pytest.param("llama-tiny", "num_hidden_layers", marks=pytest.mark.slow), ("gpt2-tiny", "n_layer")]
)
def test_the_graph_is_that_of_a_full_trace(name: str, depth: str) -> None:
    loaded = load_model(name, 4)
    setattr(loaded.model.config, depth, 4)
    with torch.device("meta"):
        model = type(loaded.model)(loaded.model.config)
    assert isinstance(loaded.example_inputs, dict)
    short, opaque = captured(model, loaded.example_inputs, True)
    full, none = captured(model, loaded.example_inputs, False)
    assert (opaque, none) == (3, 0)
    assert short == full
    assert sorted(short.count(block.name) for block in short.blocks) == [1, 1, 4]


class Layer(nn.Module):
    """`reads` and `keeps` are what a full trace only shows: the index, and a value that leaves by another way."""

    def __init__(self, index: int, reads: bool = False, keeps: bool = False) -> None:
        super().__init__()
        self.index, self.reads, self.keeps = index, reads, keeps
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.keeps:
            self.kept = x.mean()
        return x * (self.index + 1) if self.reads else x.relu()


class Stack(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, **options) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + sum(layer.kept for layer in self.layers if layer.keeps)


@pytest.mark.parametrize("options", [{}, {"reads": True}, {"keeps": True}])
def test_what_layers_do_is_kept(options: dict[str, bool]) -> None:
    model, x = Stack(**options), torch.randn(6, 4)
    graph = capture(model, (x,))
    full, _ = captured(model, {"x": x}, False)
    assert graph == full
    assert "index" not in vars(Layer), "the watch on the class is gone"


def test_layers_that_differ_are_not_one_group() -> None:
    model = Stack().to("meta")
    assert [len(group.paths) for group in find_groups(model)] == [4]
    model.layers[1].inner[0] = nn.Linear(4, 4, bias=False, device="meta")
    assert [len(group.paths) for group in find_groups(model)] == [3]
    model.layers[2].inner[0].weight = model.layers[3].inner[0].weight
    assert find_groups(model) == []


class Attends(nn.Module):
    """To a second input, whose batch is known to be that of the first only once both met."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x + torch.softmax(self.query(x) @ self.key(context).mT, -1) @ context


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Attends() for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, context)
        return x.square().mean()


def test_batches_that_meet_in_the_first_layer() -> None:
    inputs = {"x": torch.randn(4, 5, 8), "context": torch.randn(4, 3, 8)}
    (short, opaque), (full, _) = captured(TwoInputs(), inputs, True), captured(TwoInputs(), inputs, False)
    assert opaque == 3 and short == full
