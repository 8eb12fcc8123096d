"""The decoder that a captured graph is: its sizes, read off its parameters and attention, whoever wrote its module; and the one
that a Hugging Face configuration describes, in sizes, without building or capturing a model.

So what people run by hand can be priced in the form in which their software writes the model (one fused projection, a loss in
place, ...), which is the form that published runs are priced in. A graph that is no decoder of this kind gives None. So does a
configuration that is not known here in full: then the model is captured, as for any other model. A test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.decoders.decoder import Architecture, Latent
from autopar.ir.graph import Block, Graph, Node
from autopar.operations.norms import LAYER_NORM
from autopar.operations.pointwise import RELU
from autopar.operations.products import LINEAR
from autopar.operations.table import operation

_SAME_SIZE = 0.01
"""A graph is the decoder that was read off it if its parameters are as many, to this share."""


@dataclass(frozen=True, slots=True)
class RecognizedDecoder:
    """Sizes of a decoder, with the software's details left open (`software.stacks.written_by`), and its number of layers."""

    sizes: Architecture
    layers: int


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix product with a parameter."""

    at: int
    wide: int
    out: int
    weight: str
    bias: bool


def recognize(graph: Graph) -> RecognizedDecoder | None:
    """The decoder of a graph; None where it is something else (an encoder, a model of images, an unknown form of a layer)."""
    layers = [block for block in graph.blocks if any(_is_attention(node) for node in block.nodes)]
    if not layers or graph.outputs:
        return None
    block = max(layers, key=lambda each: graph.count(each.name))
    try:
        sizes = _sizes(graph, block, [each for each in layers if each is not block])
    except (ValueError, IndexError, StopIteration, TypeError):
        return None
    return RecognizedDecoder(sizes, sum(graph.count(each.name) for each in layers)) if sizes is not None else None


def same_model(one: Graph, other: Graph) -> bool:
    """Whether two graphs have as many parameters, nearly."""
    first, second = (sum(_elements(p.value.shape) for p in each.parameters().values() if not p.buffer) for each in (one, other))
    return abs(first - second) <= _SAME_SIZE * max(first, second)


def _elements(shape: tuple[object, ...]) -> int:
    return prod(int(size) for size in shape)  # type: ignore[call-overload]


def _is_attention(node: Node) -> bool:
    return operation(node.op).attention


def _products(block: Block) -> list[_Product]:
    shapes = {p.value.name: p.value.shape for p in block.parameters if not p.buffer}
    makers = {value.name: node for node in block.nodes for value in node.outputs}
    found = []
    for at, node in enumerate(block.nodes):
        operands = node.operands()
        record = operation(node.op)
        if not record.linear or record.float8:
            continue
        weight = operands[1]
        while weight not in shapes and weight in makers:  # a cast of it
            weight = makers[weight].operands()[0]
        if weight not in shapes:
            continue
        first, second = (int(size) for size in shapes[weight])
        out, wide = (first, second) if node.op == LINEAR else (second, first)
        found.append(_Product(at, wide, out, weight, len(operands) > 2))
    return found


def _sizes(graph: Graph, block: Block, others: list[Block]) -> Architecture | None:
    tables = [node for each in graph.blocks for node in each.nodes if operation(node.op).embedding]
    losses = [node for each in graph.blocks for node in each.nodes if operation(node.op).loss]
    values = block.values()
    attention = next(node for node in block.nodes if _is_attention(node))
    at = block.nodes.index(attention)
    causal = any(arg is True for arg in attention.args) or dict(attention.kwargs).get("is_causal") is True
    query, value = (values[attention.operands()[index]].shape for index in (0, 2))
    if not 1 <= len(tables) <= 2 or len(losses) != 1 or not causal or len(query) != 4:
        return None
    table_of = {p.value.name: p.value.shape for each in graph.blocks for p in each.parameters}
    vocab, hidden = (int(size) for size in table_of[tables[0].operands()[0]])
    heads, seq, head_dim, value_dim = int(query[1]), int(query[2]), int(query[3]), int(value[3])
    products = _products(block)
    before, after = [p for p in products if p.at < at], [p for p in products if p.at > at]
    if after[0].wide != heads * value_dim or after[0].out != hidden:
        return None
    latent, kv_heads = None, heads
    if value_dim != head_dim:
        latent = _latent(before, hidden, heads, head_dim, value_dim)
    else:
        width = sum(each.out for each in before if each.wide == hidden)
        kv_heads = (width // head_dim - heads) // 2
    mlp = _mlp(block, after[1:], hidden)
    dense = [_mlp(each, _after_attention(each), hidden) for each in others]
    head = next(p for each in graph.blocks for p in _products(each) if p.out == vocab)
    names = {node.op for node in block.nodes}
    vectors = [p for p in block.parameters if not p.buffer and len(p.value.shape) == 1]
    norms = [p for p in vectors if p.value.shape == (head_dim,) and head_dim != hidden]
    biased = any(p.bias for p in products)
    return Architecture(
        hidden=hidden,
        ffn=mlp.ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=value_dim if latent else head_dim,
        vocab=vocab,
        seq=seq,
        gated=mlp.gated,
        gelu=RELU not in names,
        rms_norm=LAYER_NORM not in names,
        rope=len(tables) == 1,
        learned_positions=len(tables) == 2,
        bias=biased and not mlp.gated,
        tied=any(head.weight == table.operands()[0] for table in tables),
        norm_heads=bool(norms),
        experts=mlp.experts,
        top_k=mlp.top_k,
        shared_ffn=mlp.shared_ffn,
        dense_layers=sum(graph.count(each.name) for each in others),
        dense_ffn=dense[0].ffn if dense else 0,
        latent=latent,
    )


def _after_attention(block: Block) -> list[_Product]:
    at = next(index for index, node in enumerate(block.nodes) if _is_attention(node))
    return [p for p in _products(block) if p.at > at][1:]


@dataclass(frozen=True, slots=True)
class _Mlp:
    ffn: int
    gated: bool
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0


def _mlp(block: Block, products: list[_Product], hidden: int) -> _Mlp:
    routed = next((node for node in block.nodes if operation(node.op).experts), None)
    down = [p for p in products if p.out == hidden]
    if routed is None:
        inner = sum(p.out for p in products if p.wide == hidden and p.out != hidden)
        return _Mlp(down[-1].wide, inner == 2 * down[-1].wide)
    values = block.values()
    _, choice, _, up, below, *_ = (values[name].shape for name in routed.operands())
    experts, inner = int(below[0]), _elements(below) // int(below[0]) // hidden
    shared = down[-1].wide if down else 0
    return _Mlp(inner, _elements(up) == 2 * experts * inner * hidden, experts, int(choice[-1]), shared)


def _latent(before: list[_Product], hidden: int, heads: int, head_dim: int, value_dim: int) -> Latent:
    up = next(p for p in before if p.out == heads * head_dim and p.wide != hidden)
    both = next(p for p in before if p.wide not in (hidden, up.wide))
    compressed = next(p for p in before if p.wide == hidden and p.out > both.wide and p.out != up.wide)
    rope = compressed.out - both.wide
    return Latent(up.wide, both.wide, head_dim - rope, rope, value_dim)


_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe", "deepseek_v3")
_WITH_HEAD_NORMS = ("qwen3", "qwen3_moe")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def decoder_of(config: Mapping[str, Any], seq: int) -> RecognizedDecoder | None:
    """The decoder of a configuration with sequences of `seq` tokens."""
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _gpt2(config, seq)
        return _llama(str(kind), config, seq) if kind in _LLAMAS else None
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _llama(kind: str, config: Mapping[str, Any], seq: int) -> RecognizedDecoder:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    experts = int(next((config[name] for name in _EXPERTS if config.get(name)), 0))
    own = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    latent = _latent_of(config) if kind == "deepseek_v3" else None
    head_dim = int(config.get("v_head_dim") or 0) if latent else int(config.get("head_dim") or hidden // heads)
    dense = int(config.get("first_k_dense_replace") or 0)
    sizes = Architecture(
        hidden=hidden,
        ffn=own if experts else int(config["intermediate_size"]),
        heads=heads,
        kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab=int(config["vocab_size"]),
        seq=seq,
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_heads=kind in _WITH_HEAD_NORMS,
        experts=experts,
        top_k=int(config["num_experts_per_tok"]) if experts else 0,
        shared_ffn=own * int(config.get("n_shared_experts") or 0),
        dense_layers=dense,
        dense_ffn=int(config["intermediate_size"]) if dense else 0,
        latent=latent,
    )
    return RecognizedDecoder(sizes, int(config["num_hidden_layers"]))


def _latent_of(config: Mapping[str, Any]) -> Latent:
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(*(int(config[name]) for name in names))


def _gpt2(config: Mapping[str, Any], seq: int) -> RecognizedDecoder:
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    sizes = Architecture(
        hidden=hidden,
        ffn=int(config.get("n_inner") or 4 * hidden),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=int(config["vocab_size"]),
        seq=seq,
        gated=False,
        rms_norm=False,
        rope=False,
        learned_positions=True,
        bias=True,
        tied=True,
    )
    return RecognizedDecoder(sizes, int(config["n_layer"]))
