"""Parameters and buffers of every kind on real ranks, against one process: frozen, LoRA, tied three times, parametrized, of
several dtypes in one block; buffers that the forward writes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.harness.comparison import training_differences
from support.harness.end_to_end import plan
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_calls
from support.harness.training_loop import train
from support.plans.captured_models import Case, case_of
from torch import Tensor, nn

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two layers and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def frozen() -> nn.Module:
    """Of one block the matrices, of the other a bias."""
    model = Stack()
    for parameter in (model.layers[0].up.weight, model.layers[0].down.weight, model.layers[0].norm.bias, model.layers[1].up.bias):
        parameter.requires_grad_(False)
    return model


def first_layer_frozen() -> nn.Module:
    """Nothing of it trains: it has no gradient at all."""
    model = Stack()
    model.layers[0].requires_grad_(False)
    return model


class Tied(Stack):
    """One matrix three times, and one vector that is frozen, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.first.weight = self.middle.weight = self.last.weight
        self.last.bias.requires_grad_(False)
        self.first.bias = self.last.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.layers[0](self.first(x)))
        return self.last(self.layers[1](x)).square().mean()


def tied_frozen() -> nn.Module:
    model = Tied()
    model.last.weight.requires_grad_(False)
    return model


class Decoder(Layer):
    """Layers of another kind, whose input is a view of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(x) + self.down(torch.tanh(self.up(x)))


class ClassToken(Stack):
    """The block between two stacks of layers returns a view of its parameter, which FSDP2 frees after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, WIDTH))
        self.decoder = nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        token = self.token.expand(x.shape[0], -1)
        for layer in self.decoder:
            token = layer(token)
        return (token * x).square().mean()


class Scaled(nn.Module):
    """A parametrization of one's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) * 2


def parametrized() -> nn.Module:
    from torch.nn.utils import parametrizations, parametrize

    model = Stack()
    parametrizations.weight_norm(model.layers[0].up)
    parametrize.register_parametrization(model.layers[0].down, "weight", Scaled())
    parametrizations.weight_norm(model.layers[1].down, dim=1)
    parametrizations.orthogonal(model.layers[1].up, orthogonal_map="cayley")
    return model


def spectral() -> nn.Module:
    """A power iteration in buffers that are written from nothing but the weight."""
    model = Stack()
    torch.nn.utils.parametrizations.spectral_norm(model.layers[0].up)
    return model


class Counting(nn.Module):
    """Buffers that the forward writes: a counter, moving means of the batch, a greatest value, a total, one that nobody reads."""

    steps: Tensor
    last: Tensor
    mean: Tensor
    most: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("most", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x))
        self.steps += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.square().mean(0), alpha=0.1)
            self.most.copy_(torch.maximum(self.most, h.amax(0)))
            self.last.copy_(h.mean(0))
            self.total += x.sum()
        return ((h - self.mean) / (1 + self.steps)).square().mean()


class Mixed(Stack):
    """Parameters of two dtypes in one block."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm.float()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            inner = layer.norm(x.float()).to(layer.up.weight.dtype)
            x = x + layer.down(torch.relu(layer.up(inner)))
        return x.float().square().mean()


KINDS: dict[str, Any] = {
    "frozen": frozen, "first layer frozen": first_layer_frozen, "tied": Tied, "tied frozen": tied_frozen,
    "parametrized": parametrized, "spectral": spectral, "counting": Counting,
    "class token": ClassToken,
}  # fmt: skip
FORCED: dict[str, dict[str, int]] = {
    "zero 0": {"dp": 2, "tp": 2, "zero": 0, "pp": 1}, "zero 3": {"dp": 2, "tp": 2, "zero": 3, "pp": 1},
    "dp": {"dp": 4, "zero": 2, "pp": 1}, "pp": {"pp": 2, "dp": 2, "zero": 0, "micro": 2},
}  # fmt: skip


@cache
def of_kind(kind: str) -> tuple[nn.Module, Case, list[Any], Any]:
    """The model, its case, calls, and what one process makes of them."""
    torch.manual_seed(0)
    model = KINDS[kind]().double()
    generator = torch.Generator().manual_seed(1)
    calls = [((torch.randn(8, WIDTH, generator=generator, dtype=torch.float64),), {}) for _ in range(3)]
    case = case_of(model, calls[0][0])
    return model, case, calls, train(model, calls)


def check(force: str, kinds: tuple[str, ...], ranks: RankPool) -> None:
    programs = [(of_kind(kind)[1].text(**FORCED[force]), of_kind(kind)[1].state, of_kind(kind)[2]) for kind in kinds]
    for outcomes in ranks.run(train_calls, programs, timeout=120):
        for kind, found in zip(kinds, outcomes, strict=True):
            model, case, _, expected = of_kind(kind)
            assert not training_differences(found, expected), kind
            assert found[2].keys() == {name for name in expected[2] if name in case.state}, kind
            assert found[1].keys() <= {name for name, parameter in model.named_parameters() if parameter.requires_grad}, kind


def test_equals_one_process(ranks: RankPool) -> None:
    check("zero 3", tuple(KINDS), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("force", [name for name in FORCED if name != "zero 3"])
def test_equals_one_process_on_other_plans(force: str, ranks: RankPool) -> None:
    kinds = tuple(kind for kind in KINDS if not (kind in ("counting", "spectral") and force == "pp"))
    check(force, kinds, ranks)


def test_names_of_parametrized_tensors_are_the_models_own() -> None:
    model, case, _, _ = of_kind("parametrized")
    trained_names = {name for name, parameter in case.graph.parameters().items() if parameter.trainable}
    assert trained_names == {name for name, _ in model.named_parameters()}
    assert "layers.0.up.parametrizations.weight.original0" in trained_names


def test_frozen_parameters_have_no_state_and_cost_none() -> None:
    """The plan of a model whose matrices are frozen needs less memory by their gradients and Adam's moments."""
    free, bound = Stack().double(), Stack().double()
    for layer in bound.layers:
        layer.up.weight.requires_grad_(False)
        layer.down.weight.requires_grad_(False)
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    memory = [plan(case_of(model, (x,)), {"dp": 1, "tp": 4, "zero": 0}).evaluation.peak_memory_bytes for model in (free, bound)]  # type: ignore[arg-type]
    frozen_bytes = 2 * 2 * WIDTH * 32 * 8
    assert memory[0] - memory[1] >= 2 * frozen_bytes / 4  # the moments, at least: gradients are there when activations have gone


@pytest.mark.slow
def test_two_dtypes_in_one_block(ranks: RankPool) -> None:
    """bfloat16 rounds: the first loss and gradients agree to its precision; norms stay float32."""
    torch.manual_seed(0)
    model = Stack().bfloat16()
    mixed = Mixed()
    mixed.load_state_dict(model.state_dict())
    mixed.bfloat16()
    for layer in mixed.layers:
        layer.norm.float()
    calls = [((torch.randn(8, WIDTH).bfloat16(),), {})]
    case = case_of(mixed, calls[0][0])
    dtypes = {parameter.value.dtype for parameter in case.graph.parameters().values()}
    assert dtypes == {"bfloat16", "float32"}
    expected = train(mixed, calls)
    programs = [(case.text(**FORCED[force]), case.state, calls) for force in ("zero 0", "zero 3")]
    for outcomes in ranks.run(train_calls, programs):
        for found in outcomes:
            assert {str(g.dtype) for g in found[1].values()} == {"torch.bfloat16", "torch.float32"}
            assert not training_differences(found, expected, 0.03)
