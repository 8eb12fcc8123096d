"""Packed rows of hybrids: transformers keeps documents apart in their attention, not in recurrences; nor does the program."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from support.harness.end_to_end import Prepared, check_programs, plan, prepare_model, program
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

from autopar.capture import capture
from autopar.options import PlanOptions
from autopar.plan_inputs import capture_for
from autopar.precision import precision_of
from autopar.verification.single import lift_casts

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    use_cache=False,  # with a cache transformers does not read position ids that restart
)  # fmt: skip
MAMBA: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
LENGTHS = ((5, 7), (12,), (3, 9), (11, 1))


def make(name: str) -> nn.Module:
    """A model of one recurrent layer and one of attention."""
    torch.manual_seed(0)
    if name == "Jamba":
        own: dict[str, Any] = dict(
            attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2,
            mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4,
        )  # fmt: skip
    elif name == "Qwen3Next":
        own = dict(
            head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
    else:
        own = dict(attn_layer_indices=[1], **MAMBA)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **own))
    if name != "Bamba":
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model


def packed_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    at = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    ids = torch.randint(0, 64, at.shape)
    return {"input_ids": ids, "position_ids": at, "labels": ids.masked_fill(at == 0, -100)}


@pytest.mark.parametrize("name", ["Bamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Jamba", "Qwen3Next"))])
def test_transformers_mixes_documents(name: str) -> None:
    """Where this fails, the version of transformers keeps states of recurrences apart, and so has the program to."""
    model, batch = make(name).eval(), packed_batch()
    ids, at = batch["input_ids"][:1], batch["position_ids"][:1]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=at).logits
        alone = torch.cat([model(input_ids=each).logits for each in ids.split(list(LENGTHS[0]), 1)], 1)
    first = LENGTHS[0][0]
    torch.testing.assert_close(packed[:, :first], alone[:, :first])
    assert (packed - alone)[:, first:].abs().max() > 1e-5, f"{transformers.__version__} keeps documents of {name} apart"
    with pytest.warns(UserWarning, match="kept apart in attention alone, .* a convolution over the tokens"):
        graph = capture_for(model, batch, PlanOptions(), precision_of("float32", model))
    assert any("kept apart in attention alone" in note for note in graph.notes)


@cache
def prepared(name: str) -> Prepared:
    model, batch = make(name).double(), packed_batch()
    graph = lift_casts(capture(model, (), batch, compute_dtype="float32" if name == "Jamba" else "float64"))
    return prepare_model(name, model, batch, graph, lift=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bamba", "Jamba", "Qwen3Next"])
def test_degrees_equal_one_process(name: str, ranks: RankPool) -> None:
    case = prepared(name)
    forces: tuple[dict[str, int], ...] = ({"dp": 4, "zero": 3}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 2})
    texts = [program(case, plan(case, force)) for force in forces]
    check_programs(ranks, case, texts)


def warned(**given: Tensor) -> list[str]:
    """What is said of documents where a Llama is captured with these inputs."""
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    model = transformers.LlamaForCausalLM(config)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        capture_for(model, packed_batch() | given, PlanOptions(), precision_of("float32", model))
    return [str(each.message) for each in found if "position_ids" in str(each.message)]


def test_a_mask_beside_positions_that_restart_is_a_warning() -> None:
    shown = torch.ones(4, 12, dtype=torch.int64)
    (said,) = warned(attention_mask=shown)
    assert "see each other" in said and "leave attention_mask out" in said
    assert not warned()
    counted = torch.arange(12).expand(4, -1)
    assert not warned(attention_mask=shown, position_ids=counted)
    left = torch.cat([torch.zeros(4, 3, dtype=torch.int64), shown[:, 3:]], 1)
    assert not warned(attention_mask=left, position_ids=(left.cumsum(1) - 1).masked_fill(left == 0, 1)), "padding on the left"
