"""What the model of a row looks like: the sizes that it prints, and the details that its family is known for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar.errors import AutoparError
from autopar.validate.rows import Row


class NotExpressed(AutoparError):
    """A row that the model cannot express; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder, but for its depth. Sizes are elements; flags say which operations its implementation launches."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool
    gelu: bool
    rms_norm: bool
    rope: bool
    learned_positions: bool
    bias: bool
    tied: bool
    flash: bool
    dropout: float
    fused_projections: bool
    float_logits: bool
    loss_in_place: bool
    norm_heads: bool = False
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: Latent | None = None


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks of the compressed queries and key-values,
    and head sizes without position, with position, and of values."""

    query_rank: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


_MEGATRON = ("megatron", "nemo")
_DROPOUT = ("megatron-lm-2021", "megatron-lm-2022", "megatron-core")
"""Stacks whose runs are of the training script as it is: it drops a tenth (Megatron-LM ``--hidden-dropout``)."""
_GPT2_VOCABULARY = 51200
"""50,257 tokens of GPT-2, padded as Megatron does in its published GPT runs (arXiv 2104.04473, section 5)."""


def architecture_of(row: Row) -> Architecture:
    """The decoder of a row. NotExpressed where a size is missing.

    Details by family, from their public code: MPT has neither biases nor dropout, and ties its head (llm-foundry); Megatron's GPT
    has biases, and dropout in its papers' runs; Llama has RMS norms, a gate, rotary positions and its own head; Nemotron
    squares its ReLU (arXiv 2402.16819). BLOOM's runs train without dropout (bigscience tr11 scripts).
    """
    for name, value in asdict(row).items():
        if isinstance(value, int) and value < 0:
            raise NotExpressed(f"{name} is {value}")
    gated = row.gated_mlp == 1
    stack, family = row.software_stack, row.model_family.lower()
    mpt, megatron = stack.startswith("llm-foundry"), stack.startswith(_MEGATRON)
    heads, hidden = _given(row, "heads"), _given(row, "hidden")
    vocab = row.vocab if row.vocab is not None or "gpt" not in family else _GPT2_VOCABULARY
    if vocab is None:
        raise NotExpressed("the vocabulary is not stated")
    if vocab < 1:
        raise NotExpressed(f"vocab is {vocab}")
    if row.kv_heads and heads % row.kv_heads:
        raise NotExpressed(f"{row.kv_heads} key-value heads do not divide {heads} heads")
    if row.n_experts and not 1 <= (row.top_k or 1) <= row.n_experts:
        raise NotExpressed(f"top_k={row.top_k} of {row.n_experts} experts")
    if row.n_experts and row.n_experts % (row.ep or 1):
        raise NotExpressed(f"ep={row.ep} does not divide {row.n_experts} experts")
    nemotron = "nemotron" in family
    deepseek = "deepseek" in family
    if deepseek and (hidden, heads) != (7168, 128):
        raise NotExpressed("of DeepSeek's models only V3 is known")
    if row.head_dim is None and not deepseek and hidden % heads:
        raise NotExpressed(f"{heads} heads do not divide the hidden size {hidden}")
    return Architecture(
        hidden=hidden,
        ffn=_given(row, "ffn_hidden"),
        heads=heads,
        kv_heads=row.kv_heads or heads,
        head_dim=row.head_dim or (128 if deepseek else hidden // heads),
        vocab=vocab,
        seq=_given(row, "seq_len"),
        gated=gated,
        gelu=not nemotron,
        rms_norm=gated,
        rope=gated or nemotron,
        learned_positions=not gated and not nemotron,
        bias=not gated and not mpt and not nemotron,
        tied=mpt or stack == "nanotron" or (not gated and not nemotron and stack != "megatron-core"),
        flash=row.attention != "naive",
        dropout=0.1 if stack in _DROPOUT and not gated else 0.0,
        fused_projections=mpt or megatron,
        float_logits=not mpt and not megatron,
        loss_in_place=megatron,
        norm_heads="qwen3" in family,
        experts=row.n_experts or 0,
        top_k=_given(row, "top_k") if row.n_experts else 0,
        # DeepSeek-V3 (arXiv 2412.19437, section 4.2): one shared expert, the first three layers dense, ranks and head sizes.
        # Llama 4 (model card): a shared expert as large as a routed one.
        shared_ffn=_given(row, "ffn_hidden") if row.n_experts and (deepseek or "llama-4" in family or "llama 4" in family) else 0,
        dense_layers=3 if deepseek else 0,
        dense_ffn=18432 if deepseek else 0,
        latent=Latent(1536, 512, 128, 64, 128) if deepseek else None,
    )


def _given(row: Row, name: str) -> int:
    value = getattr(row, name)
    if value is None or value < 1:
        raise NotExpressed(f"{name} is not stated")
    return int(value)
