"""The decoder of a published run: the sizes that the row states, and the details that are known of its model family and of the
software stack that ran it.

Start with `architecture_of`. The table `_FAMILIES` has what a model's name says, `software.known` what the software's says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar.decoders.decoder import Architecture, Latent
from autopar.errors import AutoparError
from autopar.software.stacks import implementation_of
from autopar.validate.rows import Row


class NotExpressed(AutoparError):
    """A row that cannot be expressed as a graph and a candidate; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Family:
    """The facts that the name of a model says. `known_size` is (hidden size, heads) of the one member of the family that is
    known."""

    gelu: bool = True
    rope: bool = False
    norm_heads: bool = False
    shared_expert: bool = False
    dense_layers: int = 0
    dense_ffn: int = 0
    head_dim: int = 0
    latent: Latent | None = None
    known_size: tuple[int, int] | None = None


_NEMOTRON = Family(gelu=False, rope=True)
"""Squared ReLU and rotary positions, without biases (arXiv 2402.16819)."""
_DEEPSEEK = Family(
    shared_expert=True,
    dense_layers=3,
    dense_ffn=18432,
    head_dim=128,
    latent=Latent(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128),
    known_size=(7168, 128),
)
"""DeepSeek-V3 (arXiv 2412.19437, section 4.2): one shared expert, the first three layers dense, ranks and head sizes."""
_LLAMA4 = Family(shared_expert=True)
"""Llama 4: its shared expert is as large as a routed one (model card)."""
_QWEN3 = Family(norm_heads=True)
_FAMILIES = {"nemotron": _NEMOTRON, "deepseek": _DEEPSEEK, "llama-4": _LLAMA4, "llama 4": _LLAMA4, "qwen3": _QWEN3}
"""The families, by a word of the model's name in lower case."""


_GPT2_VOCABULARY = 51200
"""50,257 tokens of GPT-2, padded as Megatron does in its published GPT runs (arXiv 2104.04473, section 5)."""


def architecture_of(row: Row) -> Architecture:
    """The decoder of a row. NotExpressed where a size is missing or impossible.

    A gate makes it a Llama: RMS norms, rotary positions, no biases, a head of its own, no dropout. Without a gate it is a GPT:
    layer norms, learned positions, biases, a tied head; unless its family or its stack says otherwise.
    """
    family, stack, gated = _family(row), implementation_of(row.software_stack), row.gated_mlp == 1
    _check_sizes(row, family)
    heads, ffn = stated(row, "heads"), stated(row, "ffn_hidden")
    rope = gated or family.rope
    return Architecture(
        hidden=stated(row, "hidden"),
        ffn=ffn,
        heads=heads,
        kv_heads=row.kv_heads or heads,
        head_dim=row.head_dim or family.head_dim or stated(row, "hidden") // heads,
        vocab=_vocabulary(row),
        seq=stated(row, "seq_len"),
        gated=gated,
        gelu=family.gelu,
        rms_norm=gated,
        rope=rope,
        learned_positions=not rope,
        bias=stack.bias and not rope,
        tied=not rope if stack.tied is None else stack.tied,
        flash=row.attention != "naive",
        dropout=0.0 if rope else stack.dropout,
        fused_projections=stack.fused_projections,
        float_logits=stack.float_logits,
        loss_in_place=stack.loss_in_place,
        norm_heads=family.norm_heads,
        experts=row.n_experts or 0,
        top_k=stated(row, "top_k") if row.n_experts else 0,
        shared_ffn=ffn if row.n_experts and family.shared_expert else 0,
        dense_layers=family.dense_layers,
        dense_ffn=family.dense_ffn,
        latent=family.latent,
    )


def _family(row: Row) -> Family:
    name = row.model_family.lower()
    return next((family for word, family in _FAMILIES.items() if word in name), Family())


def _vocabulary(row: Row) -> int:
    if row.vocab is None and "gpt" in row.model_family.lower():
        return _GPT2_VOCABULARY
    if row.vocab is None:
        raise NotExpressed("the vocabulary is not stated")
    return stated(row, "vocab")


def _check_sizes(row: Row, family: Family) -> None:
    """NotExpressed for the first size that is impossible."""
    negative = [(name, value) for name, value in asdict(row).items() if isinstance(value, int) and value < 0]
    if negative:
        raise NotExpressed("{} is {}".format(*negative[0]))
    heads, hidden = stated(row, "heads"), stated(row, "hidden")
    _vocabulary(row)
    kv_heads, experts, ep = row.kv_heads or heads, row.n_experts or 0, row.ep or 1
    head_known = row.head_dim is not None or bool(family.head_dim)
    impossible = (
        (heads % kv_heads != 0, f"{kv_heads} key-value heads do not divide {heads} heads"),
        (experts and not 1 <= (row.top_k or 1) <= experts, f"top_k={row.top_k} of {experts} experts"),
        (experts % ep != 0, f"ep={ep} does not divide {experts} experts"),
        (family.known_size not in (None, (hidden, heads)), "of DeepSeek's models only V3 is known"),
        (not head_known and hidden % heads != 0, f"{heads} heads do not divide the hidden size {hidden}"),
    )
    for wrong, reason in impossible:
        if wrong:
            raise NotExpressed(reason)


def stated(row: Row, name: str) -> int:
    """A positive whole number of the row. NotExpressed where the source does not state it."""
    value = getattr(row, name)
    if value is None:
        raise NotExpressed(f"{name} is not stated")
    if value < 1:
        raise NotExpressed(f"{name} is {value}")
    return int(value)
