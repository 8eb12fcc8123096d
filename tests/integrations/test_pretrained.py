"""Models of transformers that never have values on any rank: from a folder of the Hub's layout to shards, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import sgd, train

SCRIPT = Path(__file__).with_name("pretrained_script.py")
SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
    max_position_embeddings=64,
)  # fmt: skip


def untied() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=False))


def tied() -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, tie_word_embeddings=True))


def with_scaled_frequencies() -> transformers.PreTrainedModel:
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_scaling=scaling, rope_theta=10.0))


def gpt2_body_names() -> transformers.PreTrainedModel:
    """Whose files have the names of the body alone, as on the Hub."""
    sizes = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert() -> transformers.PreTrainedModel:
    drop = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drop))


def check(make: object, force: str, ranks: RankPool, folder: Path) -> None:
    torch.manual_seed(0)
    model = make()  # type: ignore[operator]
    model = model.train()
    read, written = folder / "read", folder / "written"
    (model.transformer if make is gpt2_body_names else model).save_pretrained(read)
    if make is gpt2_body_names:
        model.config.save_pretrained(read)
    ids = torch.randint(64, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    torch.save(batch, read / "batch.pt")
    for ended in launch(ranks, SCRIPT, 2, str(read), str(written), force, type(model).__name__):
        assert ended.status == 0, ended.stderr[-3000:]
    losses = train(model, [batch] * 2, sgd()).losses
    torch.testing.assert_close(torch.load(written / "losses.pt"), losses, rtol=1e-5, atol=1e-5)
    found, report = type(model).from_pretrained(written, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert type(found.config).from_pretrained(written).architectures == [type(model).__name__]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    again = folder / "again"
    found.save_pretrained(again)  # by their own writer: the same weights, under the same names
    ours, theirs = ({p.name: p for p in path.glob("*.safetensors")} for path in (written, again))
    from safetensors.torch import load_file

    one = {name: value for path in ours.values() for name, value in load_file(path).items()}
    other = {name: value for path in theirs.values() for name, value in load_file(path).items()}
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items() if name in other)


def test_tied_weights_from_the_meta_device(ranks: RankPool, tmp_path: Path) -> None:
    check(tied, "tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=2,zero=3", "pp=2"])
@pytest.mark.parametrize("make", [untied, tied, with_scaled_frequencies, gpt2_body_names, bert])
def test_models_from_the_meta_device(make: object, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(make, force, ranks, tmp_path)
