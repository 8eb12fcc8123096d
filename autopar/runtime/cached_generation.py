"""Generates with a key-value cache that stays where it is computed: sharded by heads on model axes, by examples on the data axis.

The loop that asks for logits (that of transformers, for all ways of sampling and beams) passes whole sequences. A sequence of
which all tokens but the last one are those of a row of the cache is computed from that row, and any other anew; so the cache
follows beams that are reordered, tokens that are taken back, and rows that have ended, and knows nothing of the loop. The first
token of all is computed in both ways.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .comm.convert import convert
from .compat.dtensor import local_of
from .device.groups import several_ranks
from .device.mesh import DATA_AXIS, MeshHandle
from .errors import AutoparError, RuntimeProblem, StateError
from .key_value_cache import KeyValueCache

LOGGER = logging.getLogger("autopar")

LENGTH_STEP = 64
"""Sequences are padded, and caches made, in multiples of it."""

CACHE_OUTPUTS = ("logits:full", "past_key_values.keys:dtensor", "past_key_values.values:dtensor")


@dataclass
class CacheRecord:
    """The experience of a parallel model with key-value caches: why it has none, whether that was logged, and whether the first
    token of all was computed in both ways."""

    refusal: str = ""
    is_logged: bool = False
    is_compared: bool = False


def why_no_cache(parallel: Any, parameters: Mapping[str, Any]) -> str:
    """Return why a model has no key-value cache, in words; empty where one can be tried."""
    if parallel.variants is None:
        return "the program was exported"
    if parallel.program.mesh.pp.size > 1:
        return "the plan has a pipeline"
    if not {"past_key_values", "logits_to_keep"} <= parameters.keys():
        return "its forward does not take past_key_values and logits_to_keep"
    return str(parallel.cache_record.refusal)


def log_no_cache(parallel: Any, reason: str) -> None:
    """Log why a model has no cache, in one line, on rank 0, once for each model."""
    if not parallel.cache_record.is_logged and (not dist.is_initialized() or dist.get_rank() == 0):
        name = type(parallel.plain.skeleton).__name__
        LOGGER.warning("generation of %s computes whole sequences, without a key-value cache: %s", name, reason)
    parallel.cache_record.is_logged = True


class CachedGeneration:
    """The cache of one call of `generate`. `most`: positions that the model has; `expected`: the length at the end, where that is
    known."""

    def __init__(self, parallel: Any, most: int | None, expected: int = 0) -> None:
        self.parallel, self.most, self.expected = parallel, most, expected
        self.cache: KeyValueCache | None = None
        self.rows = torch.empty(0)

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The logits of the last token ``[batch, 1, words]``, for ids, mask and positions of whole sequences
        ``[batch, tokens]``; None where there is no cache for this model. All ranks call it with the same batch."""
        if self.parallel.cache_record.refusal:
            return None
        padded_length(batch["input_ids"].shape[1], self.most)
        rows = torch.stack([each.long() for each in batch.values()], -1)
        try:
            logits = self._next_token(batch, rows)
        except AutoparError as error:
            if isinstance(error, RuntimeProblem) and not isinstance(error, StateError):
                raise
            self._refuse(str(error))  # it cannot be captured, or planned
            return None
        self.rows = rows
        return logits

    def _refuse(self, reason: str) -> None:
        self.cache = None
        self.parallel.cache_record.refusal = reason
        log_no_cache(self.parallel, reason)

    def _next_token(self, batch: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor | None:
        source = self._rows_of(rows[:, :-1]) if self.cache is not None else None
        if source is None:
            return self._whole(batch)
        assert self.cache is not None
        if not torch.equal(source, torch.arange(len(source), device=source.device)):
            self._each(lambda past: _reordered(past, source, self.parallel.program.mesh))
        logits = self._token(batch)
        if not self.parallel.cache_record.is_compared:
            cache = self.cache
            if not _close(logits, self._whole(batch)):
                self._refuse("its first token comes out differently with one")
                return None
            self.cache = cache
            self.parallel.cache_record.is_compared = True
        return logits

    def _rows_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return for each sequence a row of the cache that begins like it ``[batch]``; None where one has none."""
        length = rows.shape[1]
        if len(rows) != len(self.rows) or not 0 < length <= self.rows.shape[1]:
            return None
        past = self.rows[:, :length]
        same = torch.arange(len(rows), device=rows.device)
        if torch.equal(past, rows):
            return same
        equal = (rows[:, None] == past[None]).flatten(2).all(-1)
        return equal.int().argmax(1) if bool(equal.any(1).all()) else None

    def _whole(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute whole sequences, and start the cache."""
        length = batch["input_ids"].shape[1]
        wanted = padded_length(length, self.most)
        padded = {name: nn.functional.pad(each, (0, wanted - length)) for name, each in batch.items()}
        result = self._call(padded, KeyValueCache())
        self.cache = result.past_key_values
        mesh = self.parallel.program.mesh
        capacity = self._capacity(length)
        self._each(lambda past: _grown(_by_heads(past, mesh), capacity))
        return same_on_all_ranks(result.logits[:, length - 1 : length])

    def _token(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the last token of each sequence."""
        assert self.cache is not None
        length = batch["input_ids"].shape[1]
        if length > self.cache.capacity:
            capacity = self._capacity(length)
            self._each(lambda past: _grown(past, capacity))
        last = {name: each[:, -1:] for name, each in batch.items()}
        last["attention_mask"] = nn.functional.pad(batch["attention_mask"], (0, self.cache.capacity - length))
        position = torch.tensor(length - 1, device=last["input_ids"].device)
        result = self._call(last, KeyValueCache(self.cache.keys, self.cache.values, position))
        self.cache = result.past_key_values
        return same_on_all_ranks(result.logits)

    def _call(self, batch: Mapping[str, torch.Tensor], cache: KeyValueCache) -> Any:
        with self.parallel.returning(*CACHE_OUTPUTS):
            return self.parallel(**batch, past_key_values=cache, use_cache=True)

    def _capacity(self, length: int) -> int:
        return cache_capacity(max(length, self.expected), self.most)

    def _each(self, change: Any) -> None:
        assert self.cache is not None
        self.cache = KeyValueCache([change(each) for each in self.cache.keys], [change(each) for each in self.cache.values])


def cache_capacity(length: int, most: int | None) -> int:
    """Return the positions of a cache for sequences of this length: few different ones, each of which has a program."""
    wanted = LENGTH_STEP
    while wanted < length:
        wanted *= 2
    return wanted if most is None else min(wanted, most)


# -- the tensors of a cache: DTensors of [batch, heads, tokens, size]


def _like(past: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, past.device_mesh, past.placements, run_check=False)


def _by_heads(past: DTensor, mesh: MeshHandle) -> DTensor:
    """Return the cache sharded by heads on each model axis that divides them."""
    left, wanted = past.shape[1], []
    for axis, place in zip(mesh.axes, past.placements, strict=True):
        size = mesh.axis(axis).size
        sharded = axis != DATA_AXIS and left % size == 0
        left = left // size if sharded else left
        wanted.append(Shard(1) if sharded and size > 1 else place if axis == DATA_AXIS else Replicate())
    return past if list(past.placements) == wanted else past.redistribute(placements=wanted)


def _grown(past: DTensor, capacity: int) -> DTensor:
    """Return a cache with room for this many tokens."""
    local = local_of(past)
    return _like(past, nn.functional.pad(local, (0, 0, 0, capacity - local.shape[2])))


def _reordered(past: DTensor, source: torch.Tensor, mesh: MeshHandle) -> DTensor:
    """Return the cache with row ``source[i]`` in place of row i."""
    local, dp = local_of(past), mesh.dp
    if isinstance(past.placements[list(mesh.axes).index(DATA_AXIS)] if DATA_AXIS in mesh.axes else None, Shard):
        local, source = convert(local.contiguous(), dp, "S(0) -> R"), source.chunk(dp.size)[dp.coordinate]
    return _like(past, local.index_select(0, source))


def _close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits agree to half of the digits of their dtype."""
    scale = float(expected.abs().max()) + torch.finfo(expected.dtype).tiny
    return float((logits - expected).abs().max()) <= scale * math.sqrt(torch.finfo(expected.dtype).eps)


def same_on_all_ranks(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of rank 0: replicas may differ in the last bit, and must not choose different tokens."""
    logits = logits.contiguous()
    if several_ranks():
        dist.broadcast(logits, 0)
    return logits


def padded_length(length: int, most: int | None) -> int:
    """The length to which an input is padded, at most that of the model. RuntimeProblem where it is longer."""
    if most is not None and length > most:
        raise RuntimeProblem(f"{length} tokens, and the model has positions for {most}: generate fewer, or crop the prompt")
    up = -(-length // LENGTH_STEP) * LENGTH_STEP
    return up if most is None else min(up, most)
