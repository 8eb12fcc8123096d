"""An allocation that fails ends in one line: what was asked for, what is in use by kind, what the plan predicted, and what would
fit.

Errors inside of `Parallel`, and of any backward, become a `MemoryProblem`. Those of the optimizer's step and of other code of the
script are torch's own; where one ends the process, the line follows its traceback."""

from __future__ import annotations

import os
import re
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..comm.heartbeat import Heartbeat
from ..compat.dtensor import local_of
from ..compat.hooks import around_optimizer_steps
from ..errors import MemoryProblem
from ..quantities import size_words
from ..state.model_state import State

_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_ASKED = re.compile(r"ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

Prediction = Callable[["Usage"], str]
"""The prediction of a plan, and what would fit, in words."""


class Usage(NamedTuple):
    """Bytes in use when an allocation failed: `kinds` of those that are known, `total` of the device or process, and `asked`."""

    kinds: dict[str, int]
    total: int
    asked: int

    def __str__(self) -> str:
        rest = self.total - sum(self.kinds.values())
        kinds = self.kinds | ({"activations and the rest": rest} if rest > 0 else {})
        return f"{size_words(self.total)} in use ({', '.join(f'{name} {size_words(size)}' for name, size in kinds.items())})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def asked_bytes(error: BaseException) -> int:
    """The size of the allocation that failed; 0 where the error does not say it."""
    match = _ASKED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


class MemoryGuard:
    """Answers the failed allocations of one parallel model. `detail` says more about where it is than `doing`; `prediction` is
    that of its plan, if there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.detail: Callable[[], str] = str
        self.state: State | None = None
        self.prediction: Prediction | None = None
        self.step = 0
        self.doing = ""
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        around_optimizer_steps(self, before=MemoryGuard._step_begins, after=MemoryGuard._step_ends)

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if self._owns(optimizer):
            self.optimizers.add(optimizer)
            self.doing = "optimizer.step"

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if self._owns(optimizer):
            self.doing = ""

    def _owns(self, optimizer: Optimizer) -> bool:
        own = {id(parameter) for parameter in self.state.parameters.values()} if self.state is not None else set()
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"][:1])

    @contextmanager
    def catching(self, doing: str) -> Iterator[None]:
        """Raise a MemoryProblem where an allocation fails inside."""
        global _latest
        _latest = weakref.ref(self)
        self.doing = doing
        try:
            yield
        except Exception as error:
            problem = self.answer(error)
            if problem is None:
                raise
            raise problem from error
        finally:
            self.doing = "backward" if doing == "forward" else ""

    def answer(self, error: BaseException) -> MemoryProblem | None:
        """The error in one line; None where it is no failed allocation."""
        if not is_out_of_memory(error):
            return None
        usage = Usage(self.kinds(), self.total(), asked_bytes(error))
        asked = f"{size_words(usage.asked)} more were asked for, " if usage.asked else ""
        prediction = ""
        if self.prediction is not None:
            with suppress(Exception):  # it may fail for want of memory itself
                prediction = self.prediction(usage)
        remedy = prediction or "plan for less memory (a higher ZeRO stage, more micro-batches, more devices)"
        place = ", ".join(word for word in (self.doing, self.detail()) if word)
        where = f"in step {self.step}{f', {place}' if place else ''}" if self.step else f"before the first step, {place}"
        return MemoryProblem(f"out of memory {where}: {asked}{usage}; {remedy}")

    def kinds(self) -> dict[str, int]:
        """Bytes of what this rank holds for good."""
        if self.state is None:
            return {}
        parameters = list(self.state.parameters.values())
        states = [each for optimizer in list(self.optimizers) for state in optimizer.state.values() for each in state.values()]
        sizes = {
            "parameters": _bytes([*parameters, *self.state.buffers.values()]),
            "gradients": _bytes([parameter.grad for parameter in parameters]),
            "optimizer": _bytes(states),
        }
        if self.device.type == "cuda":
            sizes["unused in the allocator"] = int(
                torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            )
        return sizes

    def total(self) -> int:
        """Bytes in use on the device, or by this process."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        with suppress(OSError, ValueError), open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(local_of(each).nbytes for each in tensors if isinstance(each, torch.Tensor))


class WatchedWork:
    """A context around work that needs the other ranks, and memory: failed ranks are named, failed allocations explained."""

    def __init__(self, heartbeat: Heartbeat | None, memory: MemoryGuard) -> None:
        self.heartbeat, self.memory = heartbeat, memory

    @contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        heartbeat, detail = self.heartbeat, self.memory.detail
        watching = nullcontext() if heartbeat is None else heartbeat.watching(lambda: detail() or doing, doing)
        with watching, self.memory.catching(doing):
            yield


_latest: Callable[[], MemoryGuard | None] = lambda: None  # noqa: E731
"""The guard of the model that ran last."""


def latest_answer(error: BaseException) -> MemoryProblem | None:
    """Return the failed allocation in one line, as the guard of the model that ran last says it; None for any other error."""
    guard = _latest()
    return guard.answer(error) if guard is not None else None
