"""Masks that sizes decide come back as bands; those that inputs decide stay, and no wider than they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.oracles.interpret_graph import check_captured, loss_and_gradients
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.capture import capture
from autopar.ir.graph import Graph, Node, Ref

SIZE, WIDTH = 12, 8
Mask = Callable[[Tensor], Tensor]


class Masked(nn.Module):
    """One attention under a mask that `mask` makes of token ids [B, S]."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.words, self.out = mask, nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(x, 2 * x, x + 1, self.mask(ids))
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()  # type: ignore[no-any-return]


def grid(ids: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    at = torch.arange(size or ids.shape[1], device=ids.device)
    return at.unsqueeze(1), at


def causal(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return column <= row


def window(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return (column <= row) & (column > row - 4)


def both_sides(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return ((row - column).abs() <= 3) & (row >= 0)


def added(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return torch.zeros(column.shape[0], column.shape[0], device=ids.device).masked_fill(column > row, float("-inf"))


def triangle(ids: Tensor) -> Tensor:
    size = ids.shape[1]
    return torch.ones(size, size, dtype=torch.bool, device=ids.device).tril().triu(-5)


def padding(ids: Tensor) -> Tensor:
    return (ids > 2)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)


def padding_causal(ids: Tensor) -> Tensor:
    return causal(ids) & (ids > 2)[:, None, None, :]


def padding_window(ids: Tensor) -> Tensor:
    return (ids > 2)[:, None, None, :] & window(ids) & (ids < 15)[:, None, None, :]


def documents(ids: Tensor) -> Tensor:
    number = (ids == 5).cumsum(1)
    return causal(ids) & (number[:, None, :, None] == number[:, None, None, :])


def holes(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return (column - row) % 2 == 0


def of_rows(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return (column <= row) & ((row < 3) | (column > 0))


def bias(ids: Tensor) -> Tensor:
    row, column = grid(ids)
    return -0.1 * (row - column).abs().to(torch.float64)


def attention_of(graph: Graph) -> Node:
    (node,) = [node for block in graph.blocks for node in block.nodes if "attention" in node.op]
    return node


BANDS: dict[Mask, tuple[str, bool, Any, Any]] = {
    causal: ("aten.scaled_dot_product_attention", True, None, None),
    window: ("ap.attention", True, (3, 0), None),
    both_sides: ("ap.attention", False, (3, 3), None),
    added: ("aten.scaled_dot_product_attention", True, None, None),
    triangle: ("ap.attention", True, (5, 0), None),
    padding: ("aten.scaled_dot_product_attention", False, None, ("B", 1, 1, SIZE)),
    padding_causal: ("ap.attention", True, None, ("B", 1, 1, SIZE)),
    padding_window: ("ap.attention", True, (3, 0), ("B", 1, 1, SIZE)),
    holes: ("aten.scaled_dot_product_attention", False, None, (SIZE, SIZE)),
    of_rows: ("aten.scaled_dot_product_attention", False, None, (SIZE, SIZE)),
    bias: ("aten.scaled_dot_product_attention", False, None, (SIZE, SIZE)),
}


def model_of(mask: Mask) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(3, 15, (4, SIZE))
    ids[0, -5:] = 1
    return Masked(mask).double(), {"ids": ids}


@pytest.mark.parametrize("mask", list(BANDS), ids=lambda mask: mask.__name__)
def test_bands(mask: Mask) -> None:
    model, batch = model_of(mask)
    graph = capture(model, (), batch)
    node, (op, is_causal, size, kept) = attention_of(graph), BANDS[mask]
    values = {name: value for block in graph.blocks for name, value in block.values().items()}
    assert (node.op, node.args[5], dict(node.kwargs).get("window")) == (op, is_causal, size)
    left = node.args[3]
    assert (values[left.name].shape if isinstance(left, Ref) else None) == kept
    assert any("explicit mask" in note for note in graph.notes) == (kept is not None)
    # torch's flash kernel misreads float32 masks of float64 queries on AVX2 (2.13.0)
    check_captured(graph, model, batch, rtol=1e-10, eager=sdpa_kernel(SDPBackend.MATH))


@pytest.mark.parametrize(
    "mask",
    [causal, window, both_sides, pytest.param(triangle, marks=pytest.mark.slow), padding_window],
    ids=lambda mask: mask.__name__,
)
def test_a_long_sequence_is_read_without_its_square(mask: Mask) -> None:
    """131,072 positions: the mask would be 16 GiB."""
    model = Masked(mask)
    graph = capture(model, (), {"ids": torch.ones(2, 131_072, dtype=torch.int64)})
    node = attention_of(graph)
    assert (node.op, node.args[5], dict(node.kwargs).get("window")) == BANDS[mask][:3]
    assert all(value.shape[-2:] != (131_072, 131_072) for block in graph.blocks for value in block.values().values())


def test_what_depends_on_more_than_the_distance_stays_at_any_length() -> None:
    graph = capture(Masked(of_rows), (), {"ids": torch.ones(2, 131_072, dtype=torch.int64)})
    assert isinstance(attention_of(graph).args[3], Ref)


@pytest.mark.parametrize("name", ["Mistral", "ModernBert", pytest.param("Gemma3", marks=pytest.mark.slow)])
def test_windows_of_transformers(name: str) -> None:
    """Layers with and without a window are two blocks, and none has a mask."""
    import transformers

    sizes: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    grouped = {"sliding_window": 5, "num_key_value_heads": 2}
    own: dict[str, dict[str, Any]] = {
        "Mistral": grouped,
        "ModernBert": {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        "Gemma3": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], **grouped},
    }
    config, model = {
        "Mistral": ("MistralConfig", "MistralForCausalLM"),
        "ModernBert": ("ModernBertConfig", "ModernBertForMaskedLM"),
        "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes, **own[name]))
    ids = torch.randint(3, 64, (4, 16))
    graph = capture(made, (), {"input_ids": ids, "labels": ids})
    found = [node for block in graph.blocks for node in block.nodes if "attention" in node.op]
    assert found and not any(isinstance(node.args[3], Ref) for node in found) and not graph.notes
    windows = {dict(node.kwargs).get("window") for node in found}
    assert windows == {"Mistral": {(4, 0)}, "ModernBert": {None, (3, 3)}, "Gemma3": {None, (4, 0)}}[name]


class Tokens(nn.Module):
    """Attention among the tokens of the batch, in a window of this size."""

    def __init__(self, window: int, part: int = 0) -> None:
        super().__init__()
        self.embed, self.window, self.part = nn.Embedding(16, 8), window, part

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[None, None]
        at = torch.arange(ids.shape[0], device=ids.device)
        distance = at[:, None] - at
        near = distance < (ids.shape[0] // self.part if self.part else self.window)
        return F.scaled_dot_product_attention(x, x, x, (distance >= 0) & near).square().mean()


@pytest.mark.parametrize(("window", "part", "known"), [(4, 0, (3, 0)), (600, 0, (599, 0)), (5000, 0, None), (0, 2, (11, 0))])
def test_a_window_over_the_batch_holds_at_any_batch(window: int, part: int, known: tuple[int, int] | None) -> None:
    """At two tokens every window sees all of them. One that grows with the batch fixes it."""
    torch.manual_seed(0)
    model, ids = Tokens(window, part).double(), torch.randint(0, 16, (24,))
    graph = capture(model, (ids,))
    (node,) = [node for block in graph.blocks for node in block.nodes if "attention" in node.op]
    assert dict(node.kwargs).get("window") == known
    loss, _ = loss_and_gradients(graph, {"embed.weight": model.embed.weight.detach()}, {"ids": ids})
    assert loss == pytest.approx(model(ids).item(), rel=1e-12)
