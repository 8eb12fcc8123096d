"""A stand-in for CUDA graphs on CPUs: operators are recorded on a tape, and a replay runs them again on the same tensors.

As of a graph, only what was launched is run again, on the addresses and with the numbers of the capture, and no Python; and the
capture itself changes nothing. Storages that FSDP2 frees within stay, as the memory of a graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class TapeStream:
    """In place of `CaptureStream`."""

    def __init__(self, device: torch.device) -> None:
        self.captures = 0

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        tape = _Tape()
        posts = [patch.object(dist, name, tape.posts(getattr(dist, name))) for name in ("isend", "irecv")]
        with tape, patch.object(Work, "wait", _wait), posts[0], posts[1]:
            run()
        tape.undo()
        return tape.replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.own: set[int] = set()
        """Storages that were made within."""
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors from outside that were changed, with the values of before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        inputs = {_storage(each) for each in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            for each in _tensors((args, kwargs)):
                if _storage(each) not in self.own:
                    self.before.setdefault(each.data_ptr(), (each.detach(), each.detach().clone()))
        out = func(*args, **kwargs)
        self.own |= {_storage(each) for each in _tensors(out)} - inputs
        self.calls.append((func, args, kwargs, out))
        return out

    def posts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which posts a message, as it is recorded: its work is waited for where it was, not at once."""

        def post(tensor: Tensor, *args: Any) -> _Posted:
            with _disable_current_modes():
                posted = _Posted(self, function, (tensor, *args))
            if function.__name__ == "irecv":
                self.own.add(_storage(tensor))
            self.calls.append((posted.post, (), {}, None))
            return posted

        return post

    def undo(self) -> None:
        for tensor, value in self.before.values():
            tensor.copy_(value)

    def replay(self) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(_all(self.calls))):
            for func, args, kwargs, out in self.calls:
                new = func(*args, **kwargs)
                if out is None:
                    continue
                for each in tree_leaves(new):
                    if not isinstance(each, Tensor) and hasattr(each, "wait"):
                        each.wait()
                for old, each in zip(_tensors(out), _tensors(new), strict=True):
                    if func.namespace == "_c10d_functional":
                        each = torch.ops._c10d_functional.wait_tensor(each)
                    if _storage(old) != _storage(each):
                        old.copy_(each)


class _Posted:
    """The work of a message."""

    def __init__(self, tape: _Tape, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.tape, self.function, self.args = tape, function, args
        self.post()

    def post(self) -> None:
        self.work = self.function(*self.args)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        with _disable_current_modes():
            self.work.wait()
        self.tape.calls.append((lambda: self.work.wait(), (), {}, None))


_REAL_WAIT = Work.wait


def _wait(work: Any, *args: Any) -> bool:
    """Gloo computes with operators when somebody waits, which are the collective's own."""
    with _disable_current_modes():
        return _REAL_WAIT(work, *args)


def _all(calls: list[tuple[Any, Any, Any, Any]]) -> Iterator[Tensor]:
    yield from {id(each): each for call in calls for each in _tensors(call[1:])}.values()


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def tapes() -> Iterator[None]:
    """Within, parallel models with ``cuda_graph=True`` record tapes."""
    keep = patch.object(_fsdp_param, "free_storage", lambda tensor: None)
    with patch("autopar.runtime.parallel.CaptureStream", TapeStream), keep:
        yield
