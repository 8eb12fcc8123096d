"""``batch_norm="local"``: statistics of each data rank's own examples, against one process that takes the parts one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.harness.comparison import training_differences
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_calls
from support.harness.training_loop import Training, graph_state
from support.plans.captured_models import Case
from torch import Tensor, nn

import autopar
from autopar.capture import capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head, self.last = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return nn.functional.cross_entropy(self.last(self.head(h)), target)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 4, 4, generator=generator, dtype=torch.float64)
    x += torch.arange(8.0, dtype=torch.float64)[:, None, None, None]
    return {"x": x, "target": torch.randint(0, 8, (8,), generator=generator)}


def in_parts(model: nn.Module, parts: int) -> Any:
    """Loss, gradients and state of one step in which each part has statistics of its own; buffers are the mean of theirs."""
    copies = [copy.deepcopy(model) for _ in range(parts)]
    pieces = [{name: tensor.chunk(parts)[i] for name, tensor in batch().items()} for i in range(parts)]
    losses = [each(**piece) for each, piece in zip(copies, pieces, strict=True)]
    for loss in losses:
        (loss / parts).backward()
    gradients = {
        name: torch.stack([dict(each.named_parameters())[name].grad for each in copies]).sum(0)
        for name, _ in model.named_parameters()
    }
    every = [dict(each.named_buffers()) for each in copies]
    buffers = {name: torch.stack([each[name].double() for each in every]).mean(0) for name in every[0]}
    return Training([sum(loss.item() for loss in losses) / parts], gradients, buffers)


@pytest.mark.parametrize(("force", "parts"), [({"dp": 2, "tp": 2, "zero": 3}, 2), ({"tp": 4}, 1)], ids=str)
def test_equals_one_process_part_by_part(force: dict[str, int], parts: int, ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = Net().double()
    graph = capture(model, (), batch(), batch_norm="local")
    case = Case(graph, graph_state(graph, model))
    expected = in_parts(model, parts)
    for found in ranks.run(train_calls, [(case.text(pp=1, **force), case.state, [((), batch())])]):
        losses, gradients, state = found[0]
        assert not training_differences(Training(losses, gradients, {name: state[name] for name in expected[2]}), expected)


def test_the_plan_notes_it() -> None:
    plans = {kind: autopar.plan(Net(), "local:2", _float(), force="dp=2,pp=1", batch_norm=kind) for kind in ("global", "local")}
    assert any("batch_norm=local" in note for note in plans["local"].graph.notes)
    assert not any("batch_norm" in note for note in plans["global"].graph.notes)
    assert plans["local"].graph.fingerprint != plans["global"].graph.fingerprint
    from autopar.api import check_plan

    assert check_plan(plans["local"], Net(), autopar.Cluster.parse("local:2"), _float()) == plans["local"]
    with pytest.raises(autopar.AutoparError, match="write global or local"):
        autopar.plan(Net(), "local:2", _float(), batch_norm="none")


def _float() -> dict[str, Tensor]:
    return {name: tensor.float() if name == "x" else tensor for name, tensor in batch().items()}
