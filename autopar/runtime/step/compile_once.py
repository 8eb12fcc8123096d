"""One compilation of each graph in a job: the first rank that comes to it compiles, the others take what it made."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from ..compat.collectives import own_store
from ..compat.compiled_code import cache_hits, processor, recorded_code, take_code
from ..device.groups import several_ranks
from ..progress import LOGGER

T = TypeVar("T")
U = TypeVar("U")

_PIECE_BYTES = 4 << 20
"""A TCPStore closes the connection for a value of more than 8 MiB."""
_COMPILED, _CACHED = b"+", b"="
"""The first byte of published code: whether this job compiled it."""


class CompileOnce:
    """The compilations of a job, as one rank sees them. A rank asks no other one for anything: who is first is decided by the
    job's store, so ranks may come to different graphs (stages), or to none. Code that cannot be shared, for whatever reason, is
    compiled by whoever needs it."""

    def __init__(self) -> None:
        self.store: Any = own_store() if several_ranks() else None
        self.compiled = self.loaded = self.cached = 0
        self.seconds = 0.0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], options: str, compile: Callable[[], T]) -> T:
        """Return what `compile` returns, which finds its code in torch's caches where another rank has compiled this graph with
        these options. Where that rank failed, or says nothing within the store's time-out, this one compiles."""
        began = time.perf_counter()
        try:
            if self.store is None:
                return self._counted(compile)
            key = f"autopar compiled {_digest(graph, inputs, options)}"
            place = self._attempt(lambda: self.store.add(f"{key} by", 1))
            if place is None:
                return self._counted(compile)
            return self._first(key, compile) if place == 1 else self._other(key, compile)
        finally:
            self.seconds += time.perf_counter() - began

    def _first(self, key: str, compile: Callable[[], T]) -> T:
        content = b""
        try:
            with recorded_code() as code:
                cached = self.cached
                result = self._counted(compile)
                mark = _COMPILED if self.cached == cached else _CACHED
                content = mark + (self._attempt(code.archive) or b"")
        finally:
            self._attempt(lambda: publish(self.store, key, content))
        return result

    def _other(self, key: str, compile: Callable[[], T]) -> T:
        content = self._attempt(lambda: published(self.store, key)) or b""
        mark, archive = content[:1], content[1:]
        if archive:
            self._attempt(lambda: take_code(archive))
        return self._counted(compile, by_others=mark == _COMPILED)

    def _counted(self, compile: Callable[[], T], by_others: bool = False) -> T:
        """Return the result of a compilation, counted by where its code came from. `by_others`: what is found in the caches was
        compiled by another rank."""
        hits = cache_hits()
        result = compile()
        if cache_hits() == hits:
            self.compiled += 1
        elif by_others:
            self.loaded += 1
        else:
            self.cached += 1
        return result

    def _attempt(self, share: Callable[[], U]) -> U | None:
        """Return the result of a part of sharing; None, with a line of the log, where it fails."""
        try:
            return share()
        except Exception as error:  # of the store, of an archive, or of torch's caches
            LOGGER.info("compiled code is not shared: %s", error)
            return None

    def say(self) -> None:
        """Say, on the first rank, how long it took."""
        if self.compiled + self.loaded + self.cached and (self.store is None or dist.get_rank() == 0):
            LOGGER.info("%s", self)

    def __str__(self) -> str:
        counts = (self.compiled, "compiled"), (self.loaded, "compiled by other ranks"), (self.cached, "from the cache")
        return f"graphs: {', '.join(f'{count} {source}' for count, source in counts if count)} in {self.seconds:.1f} s"


def publish(store: Any, key: str, content: bytes) -> None:
    """Set `content` in a store, in pieces that it takes: the key comes last, with their number."""
    starts = range(0, len(content), _PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key} {number}", content[start : start + _PIECE_BYTES])
    store.set(key, str(len(starts)))


def published(store: Any, key: str) -> bytes:
    """Wait for what another rank publishes, and return it."""
    return b"".join(store.get(f"{key} {number}") for number in range(int(store.get(key))))


def _digest(graph: fx.GraphModule, inputs: Sequence[Any], options: str) -> str:
    """Return the key of a graph: ranks whose keys are equal may compile different code, which torch's own keys tell apart; but
    not by processor, whose vectors C++ is written for."""
    code = [module.code for module in graph.modules() if isinstance(module, fx.GraphModule)]
    on_host = all(x.device.type == "cpu" for x in inputs if isinstance(x, torch.Tensor))
    kinds = code, [*map(_kind, inputs)], options, torch.is_grad_enabled(), on_host and processor()
    return hashlib.sha256(repr(kinds).encode()).hexdigest()


def _kind(x: Any) -> tuple[str, ...]:
    parts = (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else (x,)
    return tuple(map(str, parts))
