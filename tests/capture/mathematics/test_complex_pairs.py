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
    assert (ops.count("aten.real"), ops.count("aten.imag")) == (1, 1)  # of the table, for queries and keys
    (attention,) = (node for node in layer.nodes if "attention" in node.op)
    assert dict(attention.kwargs)["enable_gqa"] is True
    assert layer.values()[attention.operands()[1]].shape == ("B", KEY_HEADS, ROWS, SIZE)
    assert len(ops) == (24 if dtype else 20)


class Repeats(nn.Module):
    """Attention whose keys are repeated, with `fixed` outside of the gradient, before heads and rows change places or after."""

    def __init__(self, fixed: bool, before: bool) -> None:
        super().__init__()
        self.fixed, self.before, self.q, self.k = fixed, before, nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x[:, :, :2])
        k = k if self.before else k.transpose(1, 2)
        heads = 2 if self.before else 1
        apart = k.unsqueeze(heads + 1)
        with torch.set_grad_enabled(not self.fixed):
            wide = apart.expand([2 if at == heads + 1 else -1 for at in range(5)])
        k = wide.flatten(heads, heads + 1)
        k = k.transpose(1, 2) if self.before else k
        return nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, k).square().sum()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_repeated_heads_outside_of_the_gradient_stay(fixed: bool, before: bool) -> None:
    graph = capture(Repeats(fixed, before), (torch.rand(6, 3, 4, SIZE),))
    (attention,) = (node for block in graph.blocks for node in block.nodes if "attention" in node.op)
    assert dict(attention.kwargs).get("enable_gqa", False) is not fixed


class Products(nn.Module):
    """A complex product that is more, or something else, than a rotation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        one, two = (torch.view_as_complex(each.unflatten(-1, (4, 2))) for each in (h, x))
        if self.kind == "numbers":
            return torch.view_as_real(one * 0.5).square().sum()
        if self.kind == "pairs of the batch":
            return torch.view_as_real(torch.view_as_complex(h[:, 0, :2]) * torch.view_as_complex(h[:, 1, 2:4])).sum()
        if self.kind == "a conjugate":
            return (torch.view_as_real(one * two.transpose(1, 2).conj().transpose(1, 2)) * h.unflatten(-1, (4, 2))).sum()
        if self.kind == "no gradients":
            with torch.no_grad():
                left = torch.view_as_complex(h.unflatten(-1, (4, 2)))
            return (torch.view_as_real(left * two) * h.unflatten(-1, (4, 2))).sum()
        if self.kind == "gradients of one":
            with torch.no_grad():
                left = torch.view_as_real(two * one)
            return (left * torch.view_as_real(two * one)).sum()
        product = one * two
        if self.kind == "other readers":
            return torch.view_as_real(product).sum() + product.abs().sum()
        if self.kind == "of itself":
            return torch.view_as_real(one * one).square().sum()
        return torch.view_as_real(product).square().flatten(1).sum()


KINDS = ("other readers", "of itself", "numbers", "pairs of the batch")
"""Products that stay as they are."""


@pytest.mark.parametrize("kind", KINDS)
def test_other_products_stay(kind: str) -> None:
    ops = [node.op for block in capture(Products(kind), (torch.rand(6, 3, 8),)).blocks for node in block.nodes]
    assert "aten.view_as_complex" in ops and not {"ap.rotary_embedding", "aten.imag"} & set(ops)


def test_complex_parameters_are_refused() -> None:
    model = ComplexRotary()
    model.factors = nn.Parameter(model._buffers.pop("factors"))
    with pytest.raises(CaptureError, match="factors is torch.complex64: keep it as pairs of real numbers"):
        capture(model, tokens())
