"""`parallel.generate` with a key-value cache: sharded by heads, and token by token what one process gives."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from e2e.variants.test_generate import POSITIONS, WORDS, language_model, ways
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar.capture import capture
from autopar.runtime.cached_generation import CachedGeneration
from autopar.runtime.errors import BatchProblem
from autopar.runtime.key_value_cache import KeyValueCache

OUTPUTS = ("logits:full", "past_key_values.keys:dtensor", "past_key_values.values:dtensor")


def parallelized(model: nn.Module, force: str) -> Any:
    """On a rank."""
    ids = torch.randint(3, WORDS, (4, 16), generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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


def keeps_its_shard(force: str, shards: int) -> None:
    """On a rank: 18 tokens after 14, whose cache grows from 16 to 32 positions, and takes ``1 / shards`` of one process's."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("autopar.runtime.cached_generation.LENGTH_STEP", 16)
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
    assert cache.bytes_here() * shards == whole
    calls.caches.clear()
    beams = dict(num_beams=3, max_new_tokens=5, **arguments)  # from 16 positions to 32
    assert torch.equal(parallel.generate(ids * mask, **beams), model.generate(ids * mask, **beams))
    assert calls.caches[0].cache is not None
    assert not [line for line in calls.lines if "without a key-value cache" in line]
    monkeypatch.undo()


def test_cache_is_sharded_by_heads(ranks: RankPool) -> None:
    ranks.run(keeps_its_shard, "tp=2,dp=1", 2, world=2, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("force", "shards"), [("tp=2,dp=2", 4), ("tp=4,dp=1", 1), ("dp=4,zero=3", 1)])
def test_cache_is_sharded_under_other_plans(ranks: RankPool, force: str, shards: int) -> None:
    """Two heads do not divide over four ranks, nor two examples: there each rank has all of them."""
    ranks.run(keeps_its_shard, force, shards, world=4, timeout=600)
