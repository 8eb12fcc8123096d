"""The decoder that a Hugging Face configuration describes, in sizes, without building or capturing a model.

A configuration that is not known here in full gives None: then the model is captured, as for any other model. A test compares
with what `recognize` reads off captured graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.decoders.decoder import Architecture, Latent
from autopar.decoders.recognize import RecognizedDecoder

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
    latent = _latent(config) if kind == "deepseek_v3" else None
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


def _latent(config: Mapping[str, Any]) -> Latent:
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
