"""`parallel.generate` equals `model.generate` of one process, token by token."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.runtime.cached_generation import padded_length
from autopar.runtime.errors import RuntimeProblem
from autopar.runtime.generate import generate

WORDS, POSITIONS = 64, 32


def language_model(kind: str) -> Any:
    """A small decoder of this family in float64, with weights that make its logits differ."""
    import transformers

    common = dict(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, **common)
    else:
        more = dict(head_dim=8) if kind == "qwen3" else {}
        config = getattr(transformers, {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[kind])(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=POSITIONS, **more, **common,
        )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def ways() -> dict[str, dict[str, Any]]:
    """Arguments of `generate`. Prompts are padded on the left, at two of four by zeros."""
    ids = torch.randint(3, WORDS, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[3, :2] = 0, 0
    padded = dict(inputs=ids * mask, attention_mask=mask)
    return {
        "greedy": padded | dict(max_new_tokens=POSITIONS - 9, do_sample=False),
        "sample": padded | dict(max_new_tokens=8, do_sample=True, top_k=20, temperature=1.3),
        "beam": padded | dict(max_new_tokens=6, num_beams=3, do_sample=False),
        "eos": padded | dict(max_new_tokens=12, do_sample=True, eos_token_id=list(range(2, 24))),
        "no mask": dict(inputs=ids[:2], max_new_tokens=4, do_sample=False),
    }


def generates(kind: str, force: str, training: bool) -> None:
    """On a rank."""
    model = language_model(kind).train(training)
    ids = torch.randint(3, WORDS, (4, 16), generator=torch.Generator().manual_seed(2))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with warnings.catch_warnings(action="ignore"):
        cluster = f"local:{torch.distributed.get_world_size()}"
        parallel = autopar.parallelize(model, cluster, {"input_ids": ids, "labels": ids}, force=force, cache=False)
    model.eval()
    for name, arguments in ways().items():
        torch.manual_seed(5)
        expected = model.generate(**arguments)
        after = torch.get_rng_state()
        torch.manual_seed(5 + (rank if name == "eos" else 0))
        own = torch.get_rng_state()
        found = parallel.generate(**arguments)
        assert torch.equal(found, expected), (name, found, expected)
        assert torch.equal(torch.get_rng_state(), own if name == "eos" and rank else after), name
    kinds = 2 + 2 * 2  # the first program; whole sequences and one token, each of a batch that divides and one that does not
    assert len(parallel.variants.programs) <= kinds, list(parallel.variants.programs)
    assert parallel.training == training and all(module.training == training for module in parallel.modules())
    for wrong, said in (
        (dict(inputs=ids, max_new_tokens=POSITIONS), f"positions for {POSITIONS}"),
        (dict(inputs=ids, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    ):
        with pytest.raises(autopar.AutoparError, match=said):
            parallel.generate(**wrong)


def test_tokens_equal_one_process(ranks: RankPool) -> None:
    ranks.run(generates, "gpt2", "tp=2,dp=1", False, world=2, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "force"), [("llama", "tp=2,dp=2"), ("qwen3", "pp=2,dp=2"), ("gpt2", "dp=4,zero=3"), ("llama", "")]
)
def test_tokens_equal_one_process_under_other_plans(ranks: RankPool, kind: str, force: str) -> None:
    ranks.run(generates, kind, force, True, world=4, timeout=600)


def test_right_padding_changes_no_logit_before_it() -> None:
    model = language_model("gpt2").eval()
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    longer = {name: nn.functional.pad(each, (0, 7)) for name, each in batch.items()}
    with torch.no_grad():
        torch.testing.assert_close(model(**longer).logits[:, :9][mask.bool()], model(**batch).logits[mask.bool()])


def test_lengths_are_few() -> None:
    assert [padded_length(length, None) for length in (1, 64, 65, 130)] == [64, 64, 128, 192]
    assert [padded_length(length, 96) for length in (1, 64, 65, 96)] == [64, 64, 96, 96]
    with pytest.raises(RuntimeProblem, match="97 tokens, and the model has positions for 96"):
        padded_length(97, 96)


class Plain(nn.Module):
    """Without a `generate`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class OfPlain:
    """A parallel model, of which only the plain one is looked at."""

    class plain:
        skeleton = Plain()


def test_other_models_are_refused() -> None:
    with pytest.raises(RuntimeProblem, match="Plain has no method generate: call the parallel model in your own loop"):
        generate(OfPlain())  # type: ignore[arg-type]
