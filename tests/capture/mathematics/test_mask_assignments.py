"""Assignments by a mask are choices, which shard as the mask and the tensor do, with torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn

from autopar.capture import capture

Write = Callable[[Tensor, Tensor, Tensor], None]


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.linear, self.token, self.write = nn.Linear(5, 7), nn.Parameter(torch.randn(7)), write

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.linear(x).clone()
        self.write(h, mask, self.token)
        return h.square().sum()


def clip(h: Tensor, mask: Tensor, token: Tensor) -> None:
    h[h > 0.5] = 0.5


def put_token(h: Tensor, mask: Tensor, token: Tensor) -> None:
    h[mask] = token


def put_row(h: Tensor, mask: Tensor, token: Tensor) -> None:
    h[~mask] = token[None] * 2


def put_columns(h: Tensor, mask: Tensor, token: Tensor) -> None:
    h[:, mask[0]] = token[0]


def put_channel(h: Tensor, mask: Tensor, token: Tensor) -> None:
    """Two indices: no choice."""
    h[mask, torch.tensor([0])] = token[1]


@pytest.mark.parametrize("write", [clip, put_token, put_row, put_columns, put_channel])
def test_equals_torch(write: Write) -> None:
    torch.manual_seed(0)
    model = Model(write).double()
    x, mask = torch.randn(4, 6, 5).double(), torch.rand(4, 6) < 0.5
    expected = model(x, mask)
    expected.backward()
    graph = capture(model, (x, mask))
    ops = [node.op for block in graph.blocks for node in block.nodes]
    assert ("aten.where.self" in ops, "aten.index_put" in ops) == (write is not put_channel, write is put_channel)
    loss, gradients = loss_and_gradients(graph, model.state_dict(), {"x": x, "mask": mask})
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, rtol=1e-9, atol=1e-12)
