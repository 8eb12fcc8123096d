"""Names of the Hub's files and those of models of transformers, as transformers says; the oracle is its own `from_pretrained`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import conversion_mapping, core_model_loading

from autopar.runtime.comm.conversions import local_shard
from autopar.runtime.errors import CheckpointProblem
from autopar.runtime.pretrained import stacked
from autopar.runtime.pretrained.conversions import hub_tensors, transforms_of
from autopar.runtime.pretrained.load import pretrained_source
from autopar.runtime.state.weight_source import WeightInParts, whole_weight

SMALL = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=32, max_position_embeddings=32,
    num_experts_per_tok=2,
)  # fmt: skip
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def mixtral(experts: int = 12) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=experts))


def qwen3_moe() -> transformers.PreTrainedModel:
    config = transformers.Qwen3MoeConfig(**SMALL, intermediate_size=24, moe_intermediate_size=12, num_experts=4, head_dim=8)
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> transformers.PreTrainedModel:
    latent = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    routed = dict(n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=12)
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SMALL, **latent, **routed, intermediate_size=24))


def test_the_version_of_transformers() -> None:
    """Whose data are read; the mapping of another version may say other things."""
    assert transformers.__version__.split(".")[0] == "5"
    assert callable(conversion_mapping.get_model_conversion_mapping)
    assert transforms_of(mixtral(2)) and not transforms_of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3])
@pytest.mark.parametrize("body", [False, True])
def test_loaded_and_written_as_transformers_does(make: Callable[[], Any], body: bool, tmp_path: Path) -> None:
    model = make()
    (model.model if body else model).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    if body:
        save_file(files | {"lm_head.weight": model.lm_head.weight.detach()}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = type(model).from_pretrained(tmp_path).state_dict()
    source = pretrained_source(model, tmp_path)
    for name, value in expected.items():
        assert torch.equal(whole_weight(source[name]), value), name
        assert torch.equal(value, model.state_dict()[name]), name
    parts = hub_tensors(model, {name: value.shape for name, value in expected.items()})
    assert parts is not None
    written = {part.name: part for each in parts.values() for part in each}
    whole = {part.name: name for name, each in parts.items() for part in each}
    if not body:
        assert written.keys() == files.keys() and any(".experts.3." in name for name in written)
        for name, part in written.items():
            box = tuple(slice(begin, begin + count) for begin, count in zip(part.start, part.size, strict=True))
            assert torch.equal(expected[whole[name]][box].reshape(part.shape), files[name]), name


def test_only_what_is_looked_at_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path)
    full, source = model.state_dict()[GATE_UP], pretrained_source(model, tmp_path)
    looked: list[Tensor] = []
    plain = stacked.mapped

    def counted(path: Path, weight: Any) -> Tensor:
        looked.append(plain(path, weight))
        return looked[-1]

    monkeypatch.setattr(stacked, "mapped", counted)
    weight = source[GATE_UP]
    assert isinstance(weight, WeightInParts) and weight.shape == full.shape and not looked
    every = [torch.arange(size) for size in full.shape]
    assert torch.equal(weight.read([every[0][9:], *every[1:]]), full[9:]) and len(looked) == 6
    looked.clear()
    assert torch.equal(weight.read([every[0][3:4], every[1][:20], every[2]]), full[3:4, :20]) and len(looked) == 1  # of w1 alone
    looked.clear()
    rows = local_shard(every[1], 0, 2, 3, 1)  # of gate and up the second of three parts
    assert torch.equal(weight.read([every[0][4:6], rows, every[2]]), local_shard(full[4:6], 1, 2, 3, 1)) and len(looked) == 4
    assert torch.equal(weight.read([every[0].flip(0), every[1][::5], every[2][3:7]]), full.flip(0)[:, ::5, 3:7])
    assert torch.equal(whole_weight(weight), full)


def test_files_that_are_stacked_already(tmp_path: Path) -> None:
    model = mixtral(4)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    source = pretrained_source(model, tmp_path)
    assert all(torch.equal(whole_weight(source[name]), value) for name, value in model.state_dict().items())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = mixtral(4)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    files = load_file(path)
    stem = "model.layers.1.block_sparse_moe.experts"
    save_file({name: value for name, value in files.items() if f"{stem}.3." not in name}, path)
    with pytest.raises(CheckpointProblem, match=r"has shape \(3, 48, 16\) in model.safetensors, and \(4, 48, 16\) in the model"):
        pretrained_source(model, tmp_path)
    save_file({name: value for name, value in files.items() if name != f"{stem}.3.w1.weight"}, path)
    with pytest.raises(CheckpointProblem, match=rf"has no {GATE_UP}, and has, which .*, {stem}.0.w1.weight and 6 more: name"):
        pretrained_source(model, tmp_path)
    save_file(files | {f"{stem}.2.w3.weight": files[f"{stem}.2.w3.weight"].bfloat16()}, path)
    with pytest.raises(CheckpointProblem, match=f"has no {GATE_UP}"):
        pretrained_source(model, tmp_path)


def test_other_conversions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixtral(4)
    model.save_pretrained(tmp_path)
    plain = conversion_mapping.get_model_conversion_mapping

    def transposed(*args: Any, **kwargs: Any) -> list[Any]:
        found = plain(*args, **kwargs)
        for each in found:
            if hasattr(each, "operations"):
                each.operations.append(core_model_loading.Transpose(1, 2))
        return found

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", transposed)
    with pytest.raises(CheckpointProblem, match=r"has no model.layers.0.mlp.experts.gate_up_proj") as error:
        pretrained_source(model, tmp_path)
    assert "\n" not in str(error.value)
    assert hub_tensors(model, {name: value.shape for name, value in model.state_dict().items()}) is None
