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
from ..compat.compiled_code import recorded_code, take_code
from ..progress import LOGGER

T = TypeVar("T")
_FAILED = b"-"


class CompileOnce:
    """The compilations of a job, as one rank sees them. A rank asks no other one for anything: who is first is decided by the
    job's store, so ranks may come to different graphs (stages), or to none."""

    def __init__(self) -> None:
        shared = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self.store = own_store() if shared else None
        self.compiled = self.loaded = 0
        self.seconds = 0.0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], options: str, compile: Callable[[], T]) -> T:
        """Return what `compile` returns, which finds its code in torch's caches where another rank has compiled this graph with
        these options. Where that rank failed, or says nothing within the store's time-out, this one compiles."""
        began = time.perf_counter()
        try:
            if self.store is None:
                self.compiled += 1
                return compile()
            key = f"autopar compiled {_digest(graph, inputs, options)}"
            run = self._first if self.store.add(f"{key} by", 1) == 1 else self._other
            return run(self.store, key, compile)
        finally:
            self.seconds += time.perf_counter() - began

    def _first(self, store: Any, key: str, compile: Callable[[], T]) -> T:
        content = _FAILED
        try:
            with recorded_code() as code:
                result = compile()
            content = code.content or _FAILED
        finally:
            store.set(key, content)
        self.compiled += 1
        return result

    def _other(self, store: Any, key: str, compile: Callable[[], T]) -> T:
        try:
            content = store.get(key)
        except dist.DistStoreError:
            content = _FAILED
        if content == _FAILED:
            self.compiled += 1
        else:
            take_code(content)
            self.loaded += 1
        return compile()

    def say(self) -> None:
        """Say, on the first rank, how long it took."""
        if self.compiled + self.loaded and (self.store is None or dist.get_rank() == 0):
            LOGGER.info("%s", self)

    def __str__(self) -> str:
        others = f", {self.loaded} of which other ranks compiled," if self.loaded else ""
        return f"compiled {self.compiled + self.loaded} graphs{others} in {self.seconds:.1f} s"


def _digest(graph: fx.GraphModule, inputs: Sequence[Any], options: str) -> str:
    """Return the key of a graph: ranks whose keys are equal may compile different code, which torch's own keys tell apart."""
    code = [module.code for module in graph.modules() if isinstance(module, fx.GraphModule)]
    return hashlib.sha256(repr((code, [*map(_kind, inputs)], options, torch.is_grad_enabled())).encode()).hexdigest()


def _kind(x: Any) -> tuple[str, ...]:
    parts = (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else (x,)
    return tuple(map(str, parts))
