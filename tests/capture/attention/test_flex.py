"""flex_attention in a model, against torch's own eager form of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.capture import capture
from autopar.ir.graph import Node

WIDTH, SIZE = 16, 12
pytestmark = pytest.mark.filterwarnings("ignore")  # of the eager form


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Tensor] | None, score: Callable[..., Tensor] | None) -> Tensor:
    """Every pair of positions by its own call."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    at = [torch.arange(size) for size in scores.shape]
    for function, given in ((score, True), (mask, False)):
        if function is None:
            continue
        call: Any = function
        for level in reversed(range(4)):
            own = [0 if each == level else None for each in range(4)]
            call = torch.vmap(call, in_dims=(0, *own) if given else tuple(own))
        found = call(scores, *at) if given else call(*at)
        scores = found if given else scores.masked_fill(~found, float("-inf"))
    return torch.nan_to_num(scores.softmax(-1)) @ v


class Flex(nn.Module):
    """Grouped heads, a mask and a change of scores by name."""

    def __init__(self, mask: str, score: str, compiled: bool = False) -> None:
        super().__init__()
        self.kinds = mask, score
        self.words, self.out = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes, self.table = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4])), nn.Parameter(torch.randn(4, SIZE))
        self.flex = torch.compile(flex_attention) if compiled else flex_attention
        self.by_hand = False

    def masks(self, ids: Tensor) -> dict[str, Any]:
        number = (ids == 5).cumsum(1)
        return {
            "": None,
            "causal": lambda b, h, q, k: q >= k,
            "window": lambda b, h, q, k: (q >= k) & (q - k < 4),
            "padding": lambda b, h, q, k: ids[b, k] > 2,
            "documents": lambda b, h, q, k: (q >= k) & (number[b, q] == number[b, k]),
        }

    def scores(self) -> dict[str, Any]:
        return {
            "": None,
            "same": lambda score, b, h, q, k: score,
            "softcap": lambda score, b, h, q, k: torch.tanh(score / 3) * 3,
            "alibi": lambda score, b, h, q, k: score - self.slopes[h] * (q - k),
            "table": lambda score, b, h, q, k: score + self.table[h][k],
        }

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)
        mask, score = self.masks(ids)[self.kinds[0]], self.scores()[self.kinds[1]]
        if self.by_hand:
            y = plain(x, 2 * x[:, :2], x[:, 1:3], mask, score)
        else:
            size = ids.shape[1]
            blocks = mask and create_block_mask(mask, ids.shape[0], None, size, size, device=ids.device)
            y = self.flex(x, 2 * x[:, :2], x[:, 1:3], score_mod=score, block_mask=blocks, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()  # type: ignore[no-any-return]


def attention_of(graph: Any) -> list[Node]:
    return [node for block in graph.blocks for node in block.nodes if "attention" in node.op]


SDPA, DOCUMENTS = "aten.scaled_dot_product_attention", "ap.attention_documents"
CASES = [
    ("", "", SDPA, False, None), ("causal", "same", SDPA, True, None), ("window", "", "ap.attention", True, (3, 0)),
    ("padding", "", SDPA, False, None), ("documents", "", DOCUMENTS, None, None), ("causal", "softcap", "", False, None),
    ("window", "alibi", "", False, None), ("padding", "table", "", False, None), ("", "alibi", "", False, None),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "score", "op", "causal", "window"), CASES)
def test_equals_the_kernel(mask: str, score: str, op: str, causal: bool | None, window: Any) -> None:
    torch.manual_seed(0)
    model = Flex(mask, score).double()
    ids = torch.randint(3, 15, (4, SIZE))
    ids[0, -5:] = 1
    graph = capture(model, (), {"ids": ids})
    found = attention_of(graph)
    causal_of = {node.name: None if node.op == DOCUMENTS else node.args[5] for node in found}
    forms = [(node.op, causal_of[node.name], dict(node.kwargs).get("window")) for node in found]
    assert forms == ([(op, causal, window)] if op else [])
    with torch.no_grad():
        theirs = model(ids)
    model.by_hand = True
    expected = model(ids)
    torch.testing.assert_close(theirs, expected.detach())  # torch's own eager form means the same
    expected.backward()
    named = dict(model.named_parameters())
    state = {name: named[name].detach() for name in graph.parameters()}
    loss, gradients = loss_and_gradients(graph, state, {"ids": ids})
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, named[name].grad, rtol=1e-9, atol=1e-12)


def test_a_compiled_function_is_the_function() -> None:
    graph = capture(Flex("window", "", compiled=True), (), {"ids": torch.ones(4, SIZE, dtype=torch.int64)})
    assert [dict(node.kwargs).get("window") for node in attention_of(graph)] == [(3, 0)]


def test_the_function_is_put_back() -> None:
    before = module.flex_attention.__code__, module.create_block_mask.__code__
    capture(Flex("causal", ""), (), {"ids": torch.ones(4, SIZE, dtype=torch.int64)})
    assert (module.flex_attention.__code__, module.create_block_mask.__code__) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_transformers(name: str) -> None:
    """The same graph as with their other implementation."""
    import transformers

    sizes: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        max_position_embeddings=64, **({"sliding_window": 5} if name == "Mistral" else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    ids = torch.randint(3, 64, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    found = []
    for implementation in ("sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)
        graph = capture(model, (), batch)
        found.append([(node.op, node.args[5], dict(node.kwargs).get("window")) for node in attention_of(graph)])
        assert not graph.notes
    assert found[0] == found[1]
