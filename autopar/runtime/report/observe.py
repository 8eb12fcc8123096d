"""Sees the collectives that this process launches and waits for, by private torch interfaces. Seen on 2.13.0;
tests/runtime/report/test_observe.py tests each. Nothing is replaced unless a step is being measured.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._pytree import tree_leaves

from ..compat.autograd import in_backward
from ..compat.modules import profiling

_GROUP_METHODS = {
    "allreduce": "all-reduce",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "allgather": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""The methods of a process group that ``torch.distributed`` calls (FSDP2, gradient buckets, pipeline), by what it is."""

FUNCTIONAL = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}
"""Functional collectives (``torch.ops._c10d_functional``): those of the program, and of DTensor."""


class Launched(NamedTuple):
    """A collective: what it is, the name of its group, the bytes of its larger side."""

    kind: str
    group: str
    bytes: int


class Observer(Protocol):
    """The receiver of what is observed."""

    def launched(self, collective: Launched) -> None:
        """A collective begins."""

    def waiting(self, collective: Launched | None, since: float) -> None:
        """This thread begins to wait for a collective (None: of which nothing is known) that was launched at `since`."""

    def wait_ended(self) -> None:
        """Note that it no longer waits."""


def _bytes(arguments: Any) -> int:
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
    return max((each.numel() * each.element_size() for each in tensors), default=0)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of the collectives that this thread (and backwards for it) launches inside."""
    owner = threading.get_ident()
    flying: dict[int, tuple[Any, Launched | None, float]] = {}

    def own() -> bool:
        return threading.get_ident() == owner or in_backward()

    def on_group(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, *args: Any, **options: Any) -> Any:
            if not own():
                return original(group, *args, **options)
            launched = Launched(kind, group.group_name, _bytes((args, options)))
            observer.launched(launched)
            since = time.perf_counter()
            work = original(group, *args, **options)
            flying[id(work)] = work, launched, since
            return work

        return run

    def functional(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or not own():
                return original(*args, **options)
            since = time.perf_counter()
            raw = original(*args, **options)
            launched = Launched(kind, str(args[-1]), _bytes((args, raw)))
            observer.launched(launched)
            flying[id(raw)] = raw, launched, since
            return raw

        return run

    def waiter(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(what: Any, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or not own():
                return original(what, *args, **options)
            _, launched, since = flying.pop(id(what), (None, None, 0.0))
            observer.waiting(launched, since)
            try:
                return original(what, *args, **options)
            finally:
                observer.wait_ended()

        return run

    operations = torch.ops._c10d_functional
    methods = {name: kind for name, kind in _GROUP_METHODS.items() if hasattr(ProcessGroup, name)}
    patches: list[Any] = [
        *(patch.object(ProcessGroup, n, on_group(k, getattr(ProcessGroup, n))) for n, k in methods.items()),
        *(patch.object(operations, n, _Operation(functional, getattr(operations, n), k)) for n, k in FUNCTIONAL.items()),
        patch.object(operations, "wait_tensor", _Operation(lambda _, wait: waiter(wait), operations.wait_tensor, "")),
        patch.object(Work, "wait", waiter(Work.wait)),
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


class _Operation:
    """An operation that is seen when it is called; its overloads (``.default``) are the original's."""

    def __init__(self, seen: Callable[[str, Any], Callable[..., Any]], original: Any, kind: str) -> None:
        self.original, self.run = original, seen(kind, original)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.run(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class PeakWatch:
    """The most bytes of tensors between `start` and `stop`, beyond those that were live at the start. On a CPU by the events of
    torch's memory profiler; on a GPU by its allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.profiler: Any = None
        self.before = 0

    def start(self) -> bool:
        """Begin to watch; return False where it cannot, since another profiler runs."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
            return True
        if profiling():
            return False
        self.profiler = torch.autograd.profiler.profile(profile_memory=True, use_cpu=True)
        with patch.dict(os.environ, KINETO_LOG_LEVEL=os.environ.get("KINETO_LOG_LEVEL", "99")):  # says on stderr that it starts
            self.profiler.__enter__()
        return True

    def stop(self) -> int:
        """The bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device)) - self.before
        profiler, self.profiler = self.profiler, None
        profiler.__exit__(None, None, None)
        events = [each for each in profiler.kineto_results.events() if each.name() == "[memory]"]
        live = most = 0
        for each in sorted(events, key=lambda event: event.start_ns()):
            live += each.nbytes()
            most = max(most, live)
        return most
