"""Masks of packed sequences become attention within documents; masks that say something else stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import Graph, Node

SIZE = 12
Mask = Callable[[Tensor, Tensor], Tensor]


class Packed(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.embed, self.qkv = mask, nn.Embedding(16, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, self.mask(ids, document)).square().mean()


def causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()


def four(ids: Tensor, document: Tensor) -> Tensor:
    return causal(ids) & (document[:, None, :, None] == document[:, None, None, :])


def three(ids: Tensor, document: Tensor) -> Tensor:
    return ((document[:, None, :] == document[:, :, None]) & causal(ids))[:, None]


def both_ways(ids: Tensor, document: Tensor) -> Tensor:
    return (document[:, :, None] == document[:, None, :]).unsqueeze(1)


def one_for_all(ids: Tensor, document: Tensor) -> Tensor:
    document = torch.arange(ids.shape[1], device=ids.device) // 5 + 0 * document[:1]
    return four(ids, document)


def by_position(ids: Tensor, document: Tensor) -> Tensor:
    before = ids[:, None, None, :] <= ids[:, None, :, None]
    return before & (document[:, None, :, None] == document[:, None, None, :])


def by_row(ids: Tensor, document: Tensor) -> Tensor:
    return (ids[:, None, :, None] >= ids[:, None, None, :]) & four(ids, document) | torch.eye(SIZE, dtype=torch.bool)


def padded(ids: Tensor, document: Tensor) -> Tensor:
    return four(ids, document) & (ids > 5)[:, None, None, :]


def padded_by_length(ids: Tensor, document: Tensor) -> Tensor:
    last = torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] - 3
    return by_position(ids, document) & (ids > 1)[:, None, None, :] & (last & (document[:1] < 3)[0])[None, None, None, :]


def padded_or_own(ids: Tensor, document: Tensor) -> Tensor:
    return padded(ids, document) | torch.eye(SIZE, dtype=torch.bool)


def queries_alone(ids: Tensor, document: Tensor) -> Tensor:
    return four(ids, document) & (ids > 1)[:, None, :, None]


def later(ids: Tensor, document: Tensor) -> Tensor:
    return (document[:, None, :, None] == document[:, None, None, :]) & causal(ids).T


def lower(ids: Tensor, document: Tensor) -> Tensor:
    return causal(ids) & (document[:, None, :, None] >= document[:, None, None, :])


def attention_of(graph: Graph) -> Node:
    (node,) = [node for block in graph.blocks for node in block.nodes if "attention" in node.op]
    return node


def check(mask: Mask) -> Graph:
    """Losses and gradients of the captured graph are those of the model."""
    torch.manual_seed(0)
    model, ids = Packed(mask).double(), torch.randint(0, 16, (4, SIZE))
    batch = {"ids": ids, "document": (torch.rand(4, SIZE) < 0.3).long().cumsum(1)}
    graph = capture(model, (), batch)
    check_captured(graph, model, batch)
    return graph


WITHIN = [four, three, both_ways, one_for_all, by_position, padded, padded_by_length]


@pytest.mark.parametrize("mask", WITHIN, ids=lambda mask: mask.__name__)
def test_documents_are_operands(mask: Mask) -> None:
    graph = check(mask)
    assert attention_of(graph).op == "ap.attention_documents"
    assert not any(value.shape[-2:] == (SIZE, SIZE) for block in graph.blocks for value in block.values().values())
    assert not any("explicit mask" in note for note in graph.notes)


@pytest.mark.parametrize("mask", [by_row, padded_or_own, queries_alone, later, lower], ids=lambda mask: mask.__name__)
def test_other_conditions_stay_a_mask(mask: Mask) -> None:
    graph = check(mask)
    assert attention_of(graph).op != "ap.attention_documents"
