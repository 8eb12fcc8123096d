"""Complex products of pairs: rotary embeddings as Meta's Llama writes them are one operation, others are left or exact."""

from __future__ import annotations

import pytest
import torch
from support.models.unseen.complex_rotary import KEY_HEADS, ROWS, SIZE, ComplexRotary
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(64, (4, ROWS)), torch.randint(64, (4, ROWS))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_layer_of_llama(dtype: str | None) -> None:
    """Rotary embeddings by pairs, and repeated heads as those of grouped queries."""
    graph = capture(ComplexRotary(), tokens(), compute_dtype=dtype)
    (layer,) = (block for block in graph.blocks if block.name == "Layer")
    ops = [node.op for node in layer.nodes]
    assert ops.count("ap.rotary_embedding") == 2 and not {"aten.view_as_complex", "aten.stack", "aten.expand"} & set(ops)
    assert ops.count("aten.view_as_real") == 1  # of the table, for queries and keys
    (attention,) = (node for node in layer.nodes if "attention" in node.op)
    assert dict(attention.kwargs)["enable_gqa"] is True
    assert layer.values()[attention.operands()[1]].shape == ("B", KEY_HEADS, ROWS, SIZE)
    assert len(ops) == (25 if dtype else 21)


class Products(nn.Module):
    """A complex product that is more, or something else, than a rotation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, two = (torch.view_as_complex(each.unflatten(-1, (4, 2))) for each in (self.inner(x), x))
        product = one * two
        if self.kind == "other readers":
            return torch.view_as_real(product).sum() + product.abs().sum()
        if self.kind == "of itself":
            return torch.view_as_real(one * one).square().sum()
        return torch.view_as_real(product).square().flatten(1).sum()


@pytest.mark.parametrize(("kind", "stays"), [("other readers", True), ("of itself", True), ("of two", False)])
def test_other_products(kind: str, stays: bool) -> None:
    ops = [node.op for block in capture(Products(kind), (torch.rand(6, 3, 8),)).blocks for node in block.nodes]
    assert ("aten.view_as_complex" in ops) == stays or kind == "of two"
    assert "ap.rotary_embedding" not in ops or kind == "of two"


def test_complex_parameters_are_refused() -> None:
    model = ComplexRotary()
    model.factors = nn.Parameter(model._buffers.pop("factors"))
    with pytest.raises(CaptureError, match="factors is torch.complex64: keep it as pairs of real numbers"):
        capture(model, tokens())
