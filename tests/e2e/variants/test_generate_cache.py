"""`parallel.generate` with a key-value cache: sharded by heads, and token by token what one process gives."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from e2e.variants.test_generate import POSITIONS, WORDS, language_model
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar.capture import capture
from autopar.runtime.cached_generation import CachedGeneration
from autopar.runtime.compat.dtensor import local_of
from autopar.runtime.key_value_cache import KeyValueCache

OUTPUTS = ("logits:full", "past_key_values.keys:dtensor", "past_key_values.values:dtensor")


def parallelized(model: nn.Module, force: str) -> Any:
    """On a rank."""
    ids = torch.randint(3, WORDS, (4, 16), generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings(action="ignore"):
        cluster = f"local:{torch.distributed.get_world_size()}"
        return autopar.parallelize(model, cluster, {"input_ids": ids, "labels": ids}, force=force, cache=False)


class Calls(logging.Handler):
    """Lines of the log, and the caches of all calls of `generate`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.caches: list[CachedGeneration] = []
        made = CachedGeneration.__init__

        def remember(cache: CachedGeneration, *args: Any, **kwargs: Any) -> None:
            self.caches.append(cache)
            made(cache, *args, **kwargs)

        monkeypatch.setattr(CachedGeneration, "__init__", remember)
        logging.getLogger("autopar").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def keeps_its_shard(force: str, shards: int, grows: bool) -> None:
    """On a rank: 18 tokens after 14, whose cache takes ``1 / shards`` of one process's. It may grow from 16 to 32 positions."""
    monkeypatch = pytest.MonkeyPatch()
    if grows:
        monkeypatch.setattr("autopar.runtime.cached_generation.LENGTH_STEP", 16)
        monkeypatch.setattr("autopar.runtime.generate._expected", lambda *_: 0)
    calls = Calls(monkeypatch)
    model = language_model("llama").eval()
    parallel = parallelized(model, force)
    ids = torch.randint(3, WORDS, (2, POSITIONS - 18), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    arguments = dict(attention_mask=mask, do_sample=False)
    found = parallel.generate(ids * mask, max_length=POSITIONS, **arguments)
    assert torch.equal(found, model.generate(ids * mask, max_length=POSITIONS, **arguments))
    (cache,) = calls.caches
    assert cache.cache is not None and cache.cache.capacity == POSITIONS
    whole = 2 * 2 * (2 * 2 * POSITIONS * 8) * 8  # keys and values of two layers [2, 2, POSITIONS, 8] in float64
    here = sum(local_of(each).nbytes for each in (*cache.cache.keys, *cache.cache.values))
    assert here * shards == whole
    if grows:
        beams = dict(num_beams=3, max_new_tokens=5, **arguments)
        assert torch.equal(parallel.generate(ids * mask, **beams), model.generate(ids * mask, **beams))
        assert calls.caches[1].cache is not None
    assert not [line for line in calls.lines if "without a key-value cache" in line]
    monkeypatch.undo()


@pytest.mark.slow
def test_cache_is_sharded_by_heads(ranks: RankPool) -> None:
    ranks.run(keeps_its_shard, "tp=2,dp=1", 2, False, world=2, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("force", "shards"), [("tp=2,dp=2", 4), ("tp=4,dp=1", 1), ("dp=4,zero=3", 1)])
def test_cache_is_sharded_under_other_plans(ranks: RankPool, force: str, shards: int) -> None:
    """Two heads do not divide over four ranks, nor two examples: there each rank has all of them."""
    ranks.run(keeps_its_shard, force, shards, True, world=4, timeout=600)


def with_a_wrong_cache(degrees: str) -> None:
    """On a rank: a cache in which the first token is not written is found out, and left."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("autopar.runtime.key_value_cache._with_token", lambda past, token, position: past + 0 * token)
    monkeypatch.setattr("support.capture_cache._key", None)  # the exports of other tests have the right one
    calls = Calls(monkeypatch)
    model = language_model("llama").eval()
    parallel = parallelized(model, degrees)
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert torch.equal(
            parallel.generate(ids, max_new_tokens=4, do_sample=False), model.generate(ids, max_new_tokens=4, do_sample=False)
        )
    said = [line for line in calls.lines if "without a key-value cache: its first token comes out differently" in line]
    assert len(said) == (torch.distributed.get_rank() == 0) and len(calls.caches) == 1
    monkeypatch.undo()


@pytest.mark.slow
def test_wrong_cache_is_left(ranks: RankPool) -> None:
    ranks.run(with_a_wrong_cache, "tp=2,dp=1", world=2, timeout=400)


# -- the cache of one process


def decoder(kind: str) -> Any:
    """A small decoder of transformers in evaluation."""
    import transformers

    more: dict[str, dict[str, Any]] = {
        "mistral": dict(sliding_window=5), "gemma2": dict(sliding_window=5, head_dim=8), "gpt_neox": dict(rotary_pct=1.0),
        "mixtral": dict(num_local_experts=4, num_experts_per_tok=2), "qwen2": dict(use_sliding_window=False),
    }  # fmt: skip
    sizes = dict(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **sizes, **more.get(kind, {}))
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model if kind in ("gemma2", "mixtral", "bloom") else model.double()  # these are not finite, or not there, in float64


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2", "gpt_neox", "phi", "mixtral", "opt", "bloom"])
def test_logits_with_a_cache_equal_those_without(kind: str) -> None:
    """Of one process, token by token after a prompt that is padded on both sides. A window is that of the model's own mask."""
    model = language_model(kind).eval() if kind == "gpt2" else decoder(kind)
    ids = torch.randint(3, WORDS, (2, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}
    batch = {name: each for name, each in batch.items() if name != "position_ids" or kind != "bloom"}
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        start = {name: nn.functional.pad(each[:, :9], (0, 4)) for name, each in batch.items()}
        result = model(**start, past_key_values=KeyValueCache(), use_cache=True)
        torch.testing.assert_close(result.logits[:, :9][mask[:, :9].bool()], expected[:, :9][mask[:, :9].bool()])
        cache = result.past_key_values
        room = [[nn.functional.pad(each, (0, 0, 0, 7)) for each in some] for some in (cache.keys, cache.values)]
        for at in range(9, 14):
            one = {name: each[:, at : at + 1] for name, each in batch.items()}
            one["attention_mask"] = nn.functional.pad(mask[:, : at + 1], (0, 19 - at))
            result = model(**one, past_key_values=KeyValueCache(*room, torch.tensor(at)), use_cache=True)
            torch.testing.assert_close(result.logits[:, 0], expected[:, at])
            room = [result.past_key_values.keys, result.past_key_values.values]


def test_layers_with_a_cache_are_one_block() -> None:
    model, keys = language_model("gpt2").eval(), [torch.zeros(2, 4, 16, 8, dtype=torch.float64)] * 2
    ids = torch.zeros(2, 1, dtype=torch.int64)
    cache = KeyValueCache(keys, keys, torch.tensor(3))
    graph = capture(
        model, (), dict(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True), outputs=OUTPUTS
    )  # fmt: skip
    assert [(block.name, graph.count(block.name)) for block in graph.blocks][1] == ("GPT2Block", 2)
    assert [output.path for output in graph.outputs][1:3] == ["past_key_values.keys.0", "past_key_values.keys.1"]


# -- loops that keep the cache themselves


def decodes_by_hand() -> None:
    """On a rank: what a script reads of a cache, or passes, is refused in a line. The field was None, the next token wrong."""
    from transformers import DynamicCache, StaticCache

    model = language_model("gpt2").eval()
    parallel = parallelized(model, "dp=2").eval()
    ids = torch.randint(3, WORDS, (4, 16), generator=torch.Generator().manual_seed(3))
    parallel.train()(input_ids=ids, labels=ids).loss.backward()
    parallel.eval()
    with torch.no_grad():
        for given in ({}, {"use_cache": True}):
            result, expected = parallel(input_ids=ids, **given), model(input_ids=ids, **given)
            torch.testing.assert_close(result.logits, expected.logits)
            assert list(result) == list(expected)
            with pytest.raises(autopar.AutoparError, match="key-value cache.* decode with parallel.generate"):
                result.past_key_values.get_seq_length()
            with pytest.raises(autopar.AutoparError, match="key-value cache.* decode with parallel.generate"):
                parallel(input_ids=ids[:, :1], past_key_values=result.past_key_values, use_cache=True)
        assert parallel(input_ids=ids, use_cache=False).past_key_values is None
        parallel.config.use_cache = model.config.use_cache = False
        assert list(parallel(input_ids=ids)) == list(model(input_ids=ids))
        for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=32), expected.past_key_values):
            said = f"past_key_values is a {type(cache).__name__} of transformers.* decode with parallel.generate"
            with pytest.raises(autopar.AutoparError, match=said):
                parallel(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)


def test_caches_of_scripts_are_refused(ranks: RankPool) -> None:
    ranks.run(decodes_by_hand, world=2, timeout=300)


# -- inputs that are DTensors


class Running(nn.Module):
    """``x[B, 4, 6], past[B, 4, 6]`` -> a sum over dimension 2, and the state of the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor, past: Tensor | None = None) -> dict[str, Tensor]:
        state = x * self.weight if past is None else past * 0.5 + x * self.weight
        return {"y": state.sum(-1), "past": state}


def takes_sharded_inputs() -> None:
    """On a rank: an input that is sharded on a model axis is taken as it is, and comes back so."""
    model = Running()
    x, past = torch.rand(2, 4, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    parallel = autopar.parallelize(model, "local:2", {"x": x}, force="tp=2,dp=1", cache=False)
    mesh = parallel.program.mesh.device_mesh
    axis = list(parallel.program.mesh.axes).index("tp")

    def placed(tensor: Tensor, place: Any) -> DTensor:
        places = [place if number == axis else Replicate() for number in range(mesh.ndim)]
        rank = torch.distributed.get_rank()
        local = tensor.chunk(2, place.dim)[rank] if isinstance(place, Shard) else tensor
        return DTensor.from_local(local.contiguous(), mesh, places)

    expected = model(x, past)
    with torch.no_grad(), parallel.returning("y:full", "past:dtensor"):
        for place in (Shard(1), Shard(2), Replicate()):
            found = parallel(x=x, past=placed(past, place))
            torch.testing.assert_close(found["y"], expected["y"])
            torch.testing.assert_close(found["past"].full_tensor(), expected["past"])
            assert not isinstance(place, Shard) or found["past"].placements[axis] == place, (place, found["past"].placements)
    assert len({key.leaves for key, _ in parallel.variants.programs}) == 4
    with pytest.raises(autopar.AutoparError, match="is a DTensor in a local batch"):
        parallel(parallel.local_batch(x=x, past=placed(past, Shard(1))))


def test_inputs_may_be_sharded(ranks: RankPool) -> None:
    ranks.run(takes_sharded_inputs, world=2, timeout=300)
