"""A captured graph gives the loss and every gradient of eager, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness.comparison import NOISE, different_tensors
from support.harness.end_to_end import prepare
from support.models.small_models import cases
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture


@pytest.mark.parametrize("name", list(cases()))
def test_equals_eager(name: str) -> None:
    prepared = prepare(name)
    loss, gradients = loss_and_gradients(prepared.graph, prepared.state, prepared.batch)
    assert loss == pytest.approx(prepared.expected.loss, rel=1e-10)
    assert not different_tensors("gradient", gradients, prepared.expected.gradients, 1e-9, noise=NOISE)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_attention_is_what_eager_had(name: str) -> None:
    graph = prepare(name).graph
    attentions = [(block, node) for block in graph.blocks for node in block.nodes if "scaled_dot_product" in node.op]
    assert len(attentions) == 1
    block, node = attentions[0]
    assert len(node.operands()) == 3 and node.args[3] is None and node.args[5] is True
    heads = 4
    assert block.values()[node.operands()[1]].shape[1] == heads


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert", "vit"])
def test_layers_are_one_block(name: str) -> None:
    prepared = prepare(name)
    graph = prepared.graph
    assert graph.batch_is_symbolic
    assert sorted(graph.count(block.name) for block in graph.blocks) == [1, 1, 2]
    assert {parameter for call in graph.calls for parameter in call.parameters} >= set(prepared.expected[2])


class Checkpointed(nn.Module):
    """Layers whose forward runs under `checkpoint`, between two others."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, **self.options)
        return nn.functional.mse_loss(self.head(x), y)


def check_gradients(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(**batch).backward()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _, gradients = loss_and_gradients(capture(model, (), batch), state, batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients.get(name), parameter.grad, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_pass_through_a_checkpoint(reentrant: bool) -> None:
    """The forward of a reentrant one is without gradients, and once it was captured so: the backward ended in torch's error.
    ``prepare_model_for_kbit_training`` of peft makes such ones by default."""
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=reentrant).double()
    batch = {"x": torch.randn(8, 8, dtype=torch.float64), "y": torch.randn(8, 4, dtype=torch.float64)}
    check_gradients(model, batch)


class Rounds(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Residual(nn.Module):
    """A layer with children, so that four of them are traced once; `inner` is around its first product."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.rand(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner == "checkpoint":
            return x + self.second(checkpoint(lambda x: torch.tanh(self.first(x * self.scale)), x, use_reentrant=True))
        if self.inner == "asks":
            return self.second(x * 2 if x.requires_grad else x * 3)
        return self.second(Rounds.apply(x * 1.0) if self.inner == "rounds" else Scales.apply(x, self.scale))


@pytest.mark.parametrize("frozen", [(), ("embed", "layers.0", "layers.1"), ("first", "second")])
@pytest.mark.parametrize("inner", ["checkpoint", "rounds", "scales", "asks"])
def test_what_asks_for_gradients_in_equal_layers(inner: str, frozen: tuple[str, ...]) -> None:
    """The border of the traced layer said that its argument requires no gradient: gradients of all layers before were lost,
    without a word in a function of one's own."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.embed, model.layers, model.loss = nn.Linear(8, 8), nn.Sequential(*(Residual(inner) for _ in range(4))), Mean()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    check_gradients(model.double(), {"input": torch.randn(6, 8, dtype=torch.float64)})


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class BesideACheckpoint(nn.Module):
    """A reentrant checkpoint whose argument requires no gradient, and layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.after, self.beside = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.beside(x)
        return (y + self.after(checkpoint(self.inside, x, use_reentrant=True))).square().mean()


def test_reentrant_checkpoint_without_a_gradient_to_pass() -> None:
    """What it calls gets no gradients in torch, and no other layer had any here."""
    torch.manual_seed(0)
    check_gradients(BesideACheckpoint().double(), {"x": torch.randn(8, 8, dtype=torch.float64)})


class ViewBeforeWrite(nn.Module):
    """A view that is older than two writes, of which a region without gradients reads it between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.linear(x) * 2
        first = whole[:, 0]
        whole.add_(1.0)
        with torch.no_grad():
            constant = first * 2
        whole[:, 1:] -= constant.unsqueeze(1)
        return (first * 3).mean() + whole.square().mean()


def test_gradient_of_a_view_after_two_writes() -> None:
    torch.manual_seed(0)
    check_gradients(ViewBeforeWrite().double(), {"x": torch.rand(4, 4, 8, dtype=torch.float64)})


def mean_of_a_number(h: Tensor) -> Tensor:
    total = h.sum()
    with torch.no_grad():
        mean = total.mean()
    return (total - mean) * h.mean()


def view_of_a_view(h: Tensor) -> Tensor:
    with torch.no_grad():
        view = h.view(-1, 2, 4)
    return (h * view.reshape(-1, 8)).sum()


def whole_write(h: Tensor) -> Tensor:
    values = torch.zeros_like(h)
    with torch.no_grad():
        values[:] = h
    return (h * values).sum()


def statistics(h: Tensor) -> Tensor:
    with torch.no_grad():
        mean, variance = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    return ((h - mean) * torch.rsqrt(variance + 1e-5)).square().sum()


class Under(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


@pytest.mark.parametrize("body", [mean_of_a_number, view_of_a_view, whole_write, statistics])
def test_no_gradient_gets_through_what_a_rewrite_leaves_out(body: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check_gradients(Under(body).double(), {"x": torch.randn(4, 6, dtype=torch.float64)})
