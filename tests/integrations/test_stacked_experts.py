"""Experts that transformers stacks when it loads them: from the files of the Hub's layout to shards, and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

SCRIPT = Path(__file__).with_name("stacked_script.py")
SMALL = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=64, max_position_embeddings=64,
    num_experts_per_tok=2,
)  # fmt: skip
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)


def mixtral(layers: int = 2) -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(**SMALL | dict(num_hidden_layers=layers), intermediate_size=48, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> transformers.PreTrainedModel:
    config = transformers.Qwen3MoeConfig(**SMALL, intermediate_size=64, moe_intermediate_size=48, num_experts=4, head_dim=8)
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> transformers.PreTrainedModel:
    routed = dict(n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1)
    config = transformers.DeepseekV3Config(**SMALL, **LATENT, **routed, intermediate_size=64, moe_intermediate_size=48)
    return transformers.DeepseekV3ForCausalLM(config)


def check(make: Any, force: str, ranks: RankPool, folder: Path) -> None:
    torch.manual_seed(0)
    model = make()
    read, written = folder / "read", folder / "written"
    model.save_pretrained(read, max_shard_size="40KB")
    files = {name: value for path in read.glob("*.safetensors") for name, value in load_file(path).items()}
    experts = sum(value.nbytes for name, value in files.items() if ".experts." in name)
    assert experts and transformers.__version__.startswith("5."), transformers.__version__
    loaded, report = type(model).from_pretrained(read, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = loaded.state_dict()
    for ended in launch(ranks, SCRIPT, 2, str(read), str(written), type(model).__name__, force):
        assert ended.status == 0, ended.stderr[-3000:]
    results = [torch.load(folder / f"written.{rank}.pt") for rank in range(2)]
    for result in results:
        for state in (result["loaded"], result["loaded_again"], result["resumed"]):
            assert expected.keys() == state.keys()
            assert not [name for name, value in expected.items() if not torch.equal(value, state[name])]
    mapped = [result["mapped"] for result in results]
    assert sum(mapped) == experts and (mapped[0] == mapped[1] or force == "pp=2"), (mapped, experts)
    own = {name: value for path in written.glob("*.safetensors") for name, value in load_file(path).items()}
    assert own.keys() == files.keys() and all(torch.equal(value, own[name]) for name, value in files.items())
    again, report = type(model).from_pretrained(written, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in expected.items())


def test_each_rank_reads_its_own_experts(ranks: RankPool, tmp_path: Path) -> None:
    check(partial(mixtral, 1), "ep=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3])
@pytest.mark.parametrize("force", ["ep=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_of_every_family(make: Any, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(make, force, ranks, tmp_path)
