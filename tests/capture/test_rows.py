"""Flattened tokens keep their dimensions, tensors that are filled part by part are joined; values and gradients stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import Graph


class Model(nn.Module):
    """A body between a projection and a loss."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.enter, self.gate = nn.Linear(6, 8), nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.enter(x)).square().sum()


def router(model: nn.Module, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 8)
    scores = F.softmax(F.linear(rows.double(), model.gate.weight.double()), dim=-1)
    groups = (scores + model.bias).reshape(-1, 2, 2)
    best = torch.topk(groups.sum(-1), 1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups.sum(-1)).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 2, 2).reshape(-1, 4)
    kept = scores.masked_fill(~mask.bool(), 0.0)
    weights, chosen = torch.topk(kept, 2, dim=1)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + scores.gather(1, chosen).sum(1, True) + 1e-3)
    used = F.one_hot(chosen, 4).to(scores.dtype)
    balance = (used.sum(0).sum(0) * torch.cat([scores, scores.square()], 0).mean(0)).sum()
    return (rows * weights.sum(-1, keepdim=True)).reshape(x.shape) + balance


def counted(model: nn.Module, x: Tensor) -> Tensor:
    chosen = model.gate(x.reshape(-1, 8)).argmax(-1, keepdim=True)
    return x.sum(-1).mean() * F.one_hot(chosen.reshape(-1), 4).sum(0)


def positions(model: nn.Module, x: Tensor) -> Tensor:
    """A sum along the rows is none of each row."""
    return model.gate(x.reshape(-1, 8).relu()).cumsum(0)


def filled(model: nn.Module, x: Tensor) -> Tensor:
    out = x.new_empty((*x.shape[:-1], 12))
    out[..., :8] = x
    out[..., 8:] = model.gate(x)[:, :1]
    return out


def partly(model: nn.Module, x: Tensor) -> Tensor:
    out = x.new_ones((*x.shape[:-1], 12))
    out[..., 2:10] = x
    return out


def shapes(graph: Graph) -> list[tuple[int | str, ...]]:
    return [value.shape for block in graph.blocks for node in block.nodes for value in node.outputs]


def operations(graph: Graph) -> set[str]:
    return {node.op for block in graph.blocks for node in block.nodes}


@pytest.mark.parametrize("body", [router, counted, positions, filled, partly])
def test_values_and_gradients_stay(body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Model(body).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    graph = capture(model, (), {"x": x})
    expected = model(x)
    expected.backward()
    state = {name: parameter.detach() for name, parameter in model.named_parameters() if name in graph.parameters()}
    loss, gradients = loss_and_gradients(graph, state, {"x": x})
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("body", [router, counted])
def test_rows_stay_apart(body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    graph = capture(Model(body), (), {"x": torch.randn(4, 5, 6)})
    merged = [shape for shape in shapes(graph) if any("*" in str(size) for size in shape)]
    assert not merged, merged


def test_what_needs_rows_in_order_has_them() -> None:
    graph = capture(Model(positions), (), {"x": torch.randn(4, 5, 6)})
    assert ("5*B", 4) in shapes(graph) and ("5*B", 8) not in shapes(graph)


def test_filled_parts_are_joined() -> None:
    graph = capture(Model(filled), (), {"x": torch.randn(4, 5, 6)})
    assert "aten.cat" in operations(graph)
    assert not {"aten.copy", "aten.slice_scatter", "aten.new_empty"} & operations(graph)
    partial = operations(capture(Model(partly), (), {"x": torch.randn(4, 5, 6)}))
    assert "aten.slice_scatter" in partial and "aten.copy" not in partial
