"""What the backward of a block runs once more, and what waits for it on the host.

A generated block with either wraps its forward in `Again` and calls what runs again through it::

    with Again(self.mesh.host) as again:
        gate = again(F.silu, gate_proj)      # not kept: the backward calls F.silu again
        again.offload(normal)                # kept, but on the host

Autograd's saved tensors go through hooks (`torch.autograd.graph.saved_tensors_hooks`). One that lies in the storage of a result
that runs again becomes a reference to that operation, and so does what the operation saves for itself; everything else is kept.
An operation runs again when the backward first asks for something of it, at most once. The order is that of the backward, which
is the same on all ranks, so collectives among them meet. Results are let go as soon as nobody refers to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .compat import storage_key
from .host import Host, Parked
from .rng import Draws

Function = Callable[..., Any]


class Again:
    """One call of a block: what its operations make that is not kept on the device, by storage."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.sources: dict[object, tuple[_Replay, int] | Parked] = {}
        self.kept: dict[object, list[_Kept]] = {}
        self.running: _Replay | None = None
        self.recording = torch.is_grad_enabled()
        self.hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Again:
        if self.recording:
            self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.recording:
            self.hooks.__exit__(*error)
        self.sources, self.kept, self.running = {}, {}, None

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, which the backward runs again. Tensors are arguments, or in tuples of arguments."""
        if not self.recording:
            return function(*args, **kwargs)
        given = (args, tuple(kwargs.values()))
        replay = _Replay(
            function,
            _mapped(args, self._held),
            {name: _mapped(value, self._held) for name, value in kwargs.items()},
            frozenset(storage_key(x) for x in _tensors(given)),
        )
        self.running = replay
        try:
            with replay.draws:
                results = function(*args, **kwargs)
        finally:
            self.running = None
        for index, result in enumerate(_tensors(results)):
            key = storage_key(result)
            if key not in replay.inputs:
                self.sources.setdefault(key, (replay, index))
        replay.inputs = frozenset()
        return results

    def offload(self, x: torch.Tensor) -> None:
        """What autograd keeps of `x`, before or after this call, waits on the host."""
        key = storage_key(x)
        if not self.recording or key in self.sources:
            return
        self.sources[key] = parked = Parked(x, self.host)
        for kept in self.kept.pop(key, []):
            if isinstance(kept.value, torch.Tensor) and parked.covers(kept.value):
                kept.value = _reference(parked, 0, kept.value)

    def _source(self, x: torch.Tensor) -> tuple[_Replay, int] | Parked | None:
        """What gives `x` to the backward, if it is not simply kept."""
        source = self.sources.get(storage_key(x))
        return None if isinstance(source, Parked) and not source.covers(x) else source

    def _held(self, x: torch.Tensor) -> _Argument:
        """An operand until the operation runs again: without its graph, or who makes it."""
        source = self._source(x)
        return _Argument(_Kept(x.detach()) if source is None else self._reference(source, x), x.requires_grad)

    def _pack(self, x: torch.Tensor) -> _Kept:
        key, running = storage_key(x), self.running
        index = running.next_saved() if running is not None else 0
        source = self._source(x)
        if source is not None:
            return self._reference(source, x)
        if running is not None and key not in running.inputs:
            running.wanted_saved.add(index)
            return _Kept(_Saved(running, index))
        kept = _Kept(x)
        self.kept.setdefault(key, []).append(kept)
        return kept

    @staticmethod
    def _reference(source: tuple[_Replay, int] | Parked, x: torch.Tensor) -> _Kept:
        if isinstance(source, Parked):
            return _Kept(_reference(source, 0, x))
        replay, index = source
        replay.wanted_results.add(index)
        return _Kept(_reference(replay, index, x))


class _Kept:
    """What autograd holds in place of a tensor: the tensor, or who makes it."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor | _View | _Saved) -> None:
        self.value = value

    def get(self) -> torch.Tensor:
        return self.value if isinstance(self.value, torch.Tensor) else self.value.get()


def _unpack(kept: _Kept) -> torch.Tensor:
    return kept.get()


class _View:
    """A piece of the storage of a result, or of what waits on the host."""

    __slots__ = ("index", "layout", "source")

    def __init__(self, source: _Replay | Parked, index: int, x: torch.Tensor) -> None:
        self.source, self.index = source, index
        start = source.start if isinstance(source, Parked) else 0
        self.layout = tuple(x.shape), x.stride(), x.storage_offset() - start

    def get(self) -> torch.Tensor:
        return self.source.result(self.index).as_strided(*self.layout)


def _reference(source: _Replay | Parked, index: int, x: torch.Tensor) -> _View:
    if isinstance(source, Parked):
        source.leave()
    return _View(source, index, x)


class _Saved:
    """The tensor that an operation saved for its own backward as its `index`-th."""

    __slots__ = ("index", "replay")

    def __init__(self, replay: _Replay, index: int) -> None:
        self.replay, self.index = replay, index

    def get(self) -> torch.Tensor:
        return self.replay.saved(self.index)


class _Argument:
    """A tensor operand, and whether autograd followed it."""

    __slots__ = ("kept", "requires_grad")

    def __init__(self, kept: _Kept, requires_grad: bool) -> None:
        self.kept, self.requires_grad = kept, requires_grad

    def get(self) -> torch.Tensor:
        return self.kept.get().detach().requires_grad_(self.requires_grad)


class _Replay:
    """One operation that runs again, in the mode of gradients in which it ran and with the same random numbers. It saves the same
    tensors in the same order."""

    def __init__(self, function: Function, args: Any, kwargs: dict[str, Any], inputs: frozenset[object]) -> None:
        self.function, self.args, self.kwargs, self.inputs = function, args, kwargs, inputs
        self.grad = torch.is_grad_enabled()
        self.draws = Draws()
        self.count = 0
        self.wanted_saved: set[int] = set()
        self.wanted_results: set[int] = set()
        self.made: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] | None = None

    def next_saved(self) -> int:
        self.count += 1
        return self.count - 1

    def result(self, index: int) -> torch.Tensor:
        return self._run()[0][index]

    def saved(self, index: int) -> torch.Tensor:
        return self._run()[1][index]

    def _run(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        if self.made is None:
            packed: list[torch.Tensor | None] = []

            def pack(x: torch.Tensor) -> None:
                packed.append(x.detach() if len(packed) in self.wanted_saved else None)

            args = _mapped(self.args, None)
            kwargs = {name: _mapped(value, None) for name, value in self.kwargs.items()}
            self.args, self.kwargs = (), {}
            with torch.set_grad_enabled(self.grad), saved_tensors_hooks(pack, _never), self.draws.repeated:
                results = self.function(*args, **kwargs)
            assert len(packed) == self.count, f"{self.function} saved {self.count} tensors, and {len(packed)} when it ran again"
            saved = {index: x for index, x in enumerate(packed) if x is not None}
            kept = {index: x.detach() for index, x in enumerate(_tensors(results)) if index in self.wanted_results}
            self.made = kept, saved
        return self.made


def _never(_: None) -> torch.Tensor:
    raise AssertionError("what runs again has no backward of its own")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, hold: Callable[[torch.Tensor], _Argument] | None) -> Any:
    """`value` with tensors held; without `hold`, with held tensors back."""
    if isinstance(value, torch.Tensor) and hold is not None:
        return hold(value)
    if isinstance(value, _Argument):
        return value.get()
    if type(value) in (tuple, list):
        return tuple(_mapped(item, hold) for item in value)
    return value
