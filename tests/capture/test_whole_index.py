"""An index by every position is a view; other indices stay. Values and gradients stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

from autopar.capture import capture
from autopar.plan_inputs import registry
from autopar.solve.space.micro_batches import why_one_micro_batch

Take = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take, self.enter = take, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        return self.take(y, torch.arange(y.shape[0]), torch.arange(y.shape[1])).square().sum()


WHOLE: dict[str, Take] = {
    "mask": lambda y, i, j: y[i[:, None, None, None], j[None, None, None, :]],
    "alone": lambda y, i, j: y[i[:, None], j],
}
OTHER: dict[str, Take] = {
    "shifted": lambda y, i, j: y[i[:, None], (j + 1) % 5],
    "transposed": lambda y, i, j: y[i[None, :], j[:, None]],
    "pairs": lambda y, i, j: y[:5][j, j],
    "part": lambda y, i, j: y[i[:, None], j[:3]],
}


def captured(take: Take) -> tuple[set[str], str]:
    """The operations of the graph, which computes what the model does, and what forces one micro-batch."""
    torch.manual_seed(0)
    model, x = Model(take).double(), torch.randn(8, 5, dtype=torch.float64)
    graph = capture(model, (), {"x": x})
    check_captured(graph, model, {"x": x}, loss_rtol=1e-10, atol=1e-11)
    return {node.op for block in graph.blocks for node in block.nodes}, why_one_micro_batch(graph, registry())


@pytest.mark.parametrize("name", WHOLE)
def test_an_index_by_every_position_is_a_view(name: str) -> None:
    ops, reason = captured(WHOLE[name])
    assert "aten.index.Tensor" not in ops and not reason


@pytest.mark.parametrize("name", OTHER)
def test_another_index_stays(name: str) -> None:
    assert "aten.index.Tensor" in captured(OTHER[name])[0]


def test_what_needs_the_whole_batch_is_said_with_its_place() -> None:
    """And not that the batch should change."""
    import autopar

    model = Model(lambda y, i, j: y - y.mean(0))
    for more in ("", ",micro=2"):
        with pytest.raises(autopar.AutoparError, match=r"test_whole_index.py:\d+.*of the whole batch: plan without one .pp=1."):
            autopar.plan(model, "local:4", (torch.randn(8, 5),), force=f"pp=2{more}")
