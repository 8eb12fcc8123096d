"""Assignments by a mask are choices, which shard as the mask and the tensor do, with torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients, run_graph
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


def put_fixed_rows(h: Tensor, mask: Tensor, token: Tensor) -> None:
    """A mask of four examples: no choice, which would broadcast it."""
    h[mask[:1].expand(4, -1)] = token


def double(h: Tensor, mask: Tensor, token: Tensor) -> None:
    h[mask] *= 2


def count_up(h: Tensor, mask: Tensor, token: Tensor) -> None:
    """The mask written twice, rows of it, and the number first."""
    h[h > 0] = (3 * h[h > 0]).add_(0.5)
    h[:, :, 2:][mask] -= 1


def logarithm(h: Tensor, mask: Tensor, token: Tensor) -> None:
    """Of others there is none."""
    h[h > 0.2] = h[h > 0.2].log()
    h[h < -0.2] = (-h[h < -0.2]).sqrt_()


def put_elsewhere(h: Tensor, mask: Tensor, token: Tensor) -> None:
    """What is picked of one tensor is put into another."""
    doubled = h[mask] * 2
    h.neg_()
    h[mask] = doubled


def put_channel(h: Tensor, mask: Tensor, token: Tensor) -> None:
    """Two indices: no choice."""
    h[mask, torch.tensor([0])] = token[1]


CHOICES = [clip, put_token, put_row, put_columns, double, count_up, logarithm, put_elsewhere]


@pytest.mark.parametrize("write", [*CHOICES, put_channel, put_fixed_rows])
def test_equals_torch(write: Write) -> None:
    torch.manual_seed(0)
    model = Model(write).double()
    x, mask = torch.randn(4, 6, 5).double(), torch.rand(4, 6) < 0.5
    expected = model(x, mask)
    expected.backward()
    graph = capture(model, (x, mask))
    ops = [node.op for block in graph.blocks for node in block.nodes]
    puts = write in (put_channel, put_fixed_rows)
    assert ("aten.where.self" in ops, "aten.index_put" in ops) == (not puts, puts)
    loss, gradients = loss_and_gradients(graph, model.state_dict(), {"x": x, "mask": mask})
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, rtol=1e-9, atol=1e-12)


class Counts(nn.Module):
    """An assignment to integers, of which the value has another dtype: torch casts it."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts = counts.clone()
        counts[counts > 2] = torch.tensor(1.7)
        return (x * counts).sum()


def test_the_value_is_of_the_dtype_of_what_it_is_put_into() -> None:
    x, counts = torch.rand(4, 6).double(), torch.randint(0, 5, (4, 6))
    graph = capture(Counts(), (x, counts))
    assert run_graph(graph, {}, {"x": x, "counts": counts}).item() == pytest.approx(Counts()(x, counts).item(), rel=1e-12)
