"""Blocks under torch.compile, each distinct one compiled once: what the plan recomputes in the backward is recomputed by the
compiled backward, and is not saved; what it offloads or partitions is saved elsewhere. Of each graph there is one compilation in
a job: the first rank that comes to it compiles, the others take what it made."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from ..compat.collectives import own_store
from ..compat.compile import BlockBackend, NotOneGraph, cache_hits, compiler_named, processor, reason_of, recorded_code, take_code
from ..device.groups import several_ranks
from ..module import BlockModule, Program
from ..progress import LOGGER, working
from .recompute import Recompute

Backend = str | Callable[..., Any]


def compile_blocks(program: Program, backend: Backend) -> None:
    """Compile each block with a backend of torch.compile; collectives of the mesh's `async_tp` run in pieces beside products."""
    left_out, compiler, once = set[type[BlockModule]](), compiler_named(backend), CompileOnce()
    waiting = list(program.blocks())
    for block in program.blocks():
        own = BlockBackend(compiler, every=block.recompute, groups=program.mesh.async_tp, compilations=once)
        if block.recompute or block.selective_recompute:
            compiled: Callable[..., Any] = _RecomputingBlock(block, own, left_out)
        else:
            compiled = torch.compile(block.forward, backend=own)
        block.forward = _FirstCall(block, compiled, waiting, once)


class _FirstCall:
    """The first call of a block, which compiles it and may take long; it then gives its place to the compiled block. The last of
    the `waiting` blocks says how long it took."""

    def __init__(self, block: BlockModule, compiled: Callable[..., Any], waiting: list[BlockModule], once: CompileOnce) -> None:
        self.block, self.compiled, self.waiting, self.once = block, compiled, waiting, once

    def __call__(self, *args: torch.Tensor) -> Any:
        self.block.forward = self.compiled
        with working(f"compiling {type(self.block).__name__}"):
            results = self.compiled(*args)
        self.waiting.pop()
        if not self.waiting:
            self.once.say()
        return results


class _RecomputingBlock:
    """The forward of a block that recomputes, offloads or saves parts. It has to be a single graph, since what is saved is
    decided for a graph: it runs as it is, with a warning, where it calls what torch.compile does not trace. `left_out`: classes
    that did so, of all blocks of the program."""

    def __init__(self, block: BlockModule, backend: Callable[..., Any], left_out: set[type[BlockModule]]) -> None:
        self.kind, self.eager, self.left_out, self.host = type(block), block.forward, left_out, block.mesh.host_memory
        # the class' own code: torch counts what it compiled of each code
        self.compiled = torch.compile(MethodType(type(block).forward, block), backend=backend, fullgraph=True)

    def __call__(self, *args: torch.Tensor) -> Any:
        if self.kind not in self.left_out:
            try:
                with Recompute(self.host) as recompute:
                    results = self.compiled(*args)
                    recompute.save_traced()
                return results
            except NotOneGraph as error:
                self.left_out.add(self.kind)
                warnings.warn(
                    f"not compiled: {self.kind.__name__}, which recomputes and has to be one graph: {reason_of(error)}",
                    stacklevel=3,
                )
        return self.eager(*args)


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
