"""Selective recomputation, offloading and partition: what the backward of a block recomputes, and which saved tensors lie in host
memory, or in parts on the ranks of an axis.

A generated block with any of them wraps its forward in `Recompute`, and calls what is recomputed through it::

    with Recompute(self.mesh.host_memory) as recompute:
        gate = recompute(F.silu, gate_proj)  # not saved: the backward calls F.silu again
        recompute.offload(normal)            # saved, but in host memory
        recompute.partition(up_proj, tp)     # each rank of tp saves a part

Autograd's saved tensors go through hooks (`torch.autograd.graph.saved_tensors_hooks`). One that lies in the storage of a
recomputed result becomes a reference to its operation, and so does what the operation saves for itself; everything else is saved
as usual. An operation is recomputed when the backward first needs something of it, at most once. The order is that of the
backward, which is the same on all ranks, so that recomputed collectives match. Results are freed as soon as nothing refers to
them.

Compiled blocks have the same plan in another way (`compiled_blocks`): operations that are recomputed are marked, and the compiled
backward recomputes what is marked; tensors that are offloaded or partitioned are results of the compiled code too, and what
autograd saves of them is found by their storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..compat.autograd import saved_tensor, storage_key
from ..compat.collectives import all_gather, wait_tensor
from ..compat.compile import marked_as_saved_elsewhere, marked_for_recomputation
from ..device.axis import AxisHandle
from ..device.offload import HostMemory, OffloadedCall, OffloadedTensor, SavedSpan
from ..device.rng import RngRecorder

Function = Callable[..., Any]


class PartitionedTensor(SavedSpan):
    """A span that all ranks of `axis` hold alike, of which each saves a share of the bytes, and which is gathered once. The
    backward is the same on all ranks, so the collectives match."""

    def __init__(self, x: torch.Tensor, axis: AxisHandle) -> None:
        super().__init__(x)
        self.axis = axis
        self.share: torch.Tensor | None = None

    def store(self) -> None:
        """Copy this rank's share, if that is not done; nothing here refers to the whole tensor then."""
        if self.share is None and self.on_device is not None:
            flat, self.on_device = self.on_device.view(torch.uint8), None
            each = -(-flat.numel() // self.axis.size)
            own = flat[self.axis.coordinate * each : (self.axis.coordinate + 1) * each]
            self.share = torch.cat((own, flat.new_zeros(each - own.numel())))

    def result(self) -> torch.Tensor:
        if self.on_device is None:
            assert self.share is not None
            flat = wait_tensor(all_gather(self.share, self.axis.size, self.axis.group_name))
            size = (self.end - self.start) * self.dtype.itemsize
            self.on_device, self.share = flat.view(-1)[:size].view(self.dtype), None
        return self.on_device


class Recompute:
    """One call of a block. `sources`: by storage, who provides in the backward what is not simply saved on the device."""

    def __init__(self, host_memory: HostMemory) -> None:
        self.host_memory = host_memory
        self.sources: dict[object, _RecomputedResult | SavedSpan] = {}
        self.saved: dict[object, list[_SavedTensor]] = {}
        self.running: _RecomputedOperation | None = None
        self.compiling = torch.compiler.is_compiling()
        self.recording = torch.is_grad_enabled() and not self.compiling

    def __enter__(self) -> Recompute:
        if self.recording:
            self.offloaded = OffloadedCall(self.host_memory)
            self.hooks = saved_tensors_hooks(self._pack, _SavedTensor.get)
            self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.recording:
            self.hooks.__exit__(*error)
        self.sources, self.saved, self.running = {}, {}, None

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, which the backward recomputes. Tensors are arguments, or in tuples of them."""
        if self.compiling:
            with marked_for_recomputation():
                return function(*args, **kwargs)
        if not self.recording:
            return function(*args, **kwargs)
        operation = self.running = _RecomputedOperation(
            function,
            _mapped(args, torch.Tensor, self._as_argument),
            {name: _mapped(value, torch.Tensor, self._as_argument) for name, value in kwargs.items()},
            frozenset(storage_key(x) for x in _tensors((args, tuple(kwargs.values())))),
        )
        try:
            with operation.rng:
                results = function(*args, **kwargs)
        finally:
            self.running = None
        for index, result in enumerate(_tensors(results)):
            key = storage_key(result)
            if key not in operation.inputs:
                self.sources.setdefault(key, _RecomputedResult(operation, index))
        operation.inputs = frozenset()
        return results

    def offload(self, x: torch.Tensor) -> None:
        """Save in host memory whatever autograd saves of `x`, before or after this call."""
        if self.compiling:
            self._trace(x, None)
        elif self._to_be_saved(x):
            self._save_elsewhere(x, OffloadedTensor(x, self.offloaded))

    def partition(self, x: torch.Tensor, axis: AxisHandle) -> None:
        """Save only a part on each rank of the axis, of whatever autograd saves of `x` before or after this call."""
        if self.compiling and axis.size > 1:
            self._trace(x, axis)
        elif axis.size > 1 and self._to_be_saved(x):
            self._save_elsewhere(x, PartitionedTensor(x, axis))

    def save_traced(self) -> None:
        """Offload and partition the tensors that compiled code has marked, of which autograd has saved something."""
        marked, self.host_memory.traced = self.host_memory.traced, []
        for x, axis in marked:
            if axis is None:
                self.offload(x)
            else:
                self.partition(x, axis)

    def _trace(self, x: torch.Tensor, axis: AxisHandle | None) -> None:
        if torch.is_grad_enabled():
            self.host_memory.traced.append((marked_as_saved_elsewhere(x), axis))

    def _to_be_saved(self, x: torch.Tensor) -> bool:
        return self.recording and storage_key(x) not in self.sources

    def _save_elsewhere(self, x: torch.Tensor, source: SavedSpan) -> None:
        key = storage_key(x)
        self.sources[key] = source
        for saved in self.saved.pop(key, []):
            if isinstance(saved.value, torch.Tensor) and source.covers(saved.value):
                saved.value = _view(source, saved.value)

    def _view_of_source(self, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return the function that gives `x` in the backward; None where it is simply saved."""
        source = self.sources.get(storage_key(x))
        return _view(source, x) if source is not None and source.covers(x) else None

    def _as_argument(self, x: torch.Tensor) -> _Argument:
        return _Argument(_SavedTensor(self._view_of_source(x) or x.detach()), x.requires_grad)

    def _pack(self, x: torch.Tensor) -> _SavedTensor:
        key, running = storage_key(x), self.running
        index = running.next_saved() if running is not None else 0
        if (view := self._view_of_source(x)) is not None:
            return _SavedTensor(view)
        if running is not None and key not in running.inputs:
            running.wanted_saved.add(index)
            return _SavedTensor(partial(running.saved, index))
        saved = _SavedTensor(x)
        self.saved.setdefault(key, []).append(saved)
        return saved


class _SavedTensor:
    """The handle that autograd holds in place of a tensor: the tensor, or the function that gives it in the backward."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        self.value = value

    def get(self) -> torch.Tensor:
        return saved_tensor(self.value)


@dataclass(frozen=True, slots=True)
class _Argument:
    """A tensor operand until the recomputation: without its graph, and whether it requires a gradient."""

    saved: _SavedTensor
    requires_grad: bool

    def get(self) -> torch.Tensor:
        return self.saved.get().detach().requires_grad_(self.requires_grad)


def _view(source: _RecomputedResult | SavedSpan, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the function that gives the view `x` of what `source` provides from now on."""
    source.store()
    shape, stride, offset = tuple(x.shape), x.stride(), x.storage_offset() - source.start
    return lambda: source.result().as_strided(shape, stride, offset)


class _RecomputedOperation:
    """An operation that is recomputed with the gradient mode and the random numbers of the forward; it saves the same tensors in
    the same order."""

    def __init__(self, function: Function, args: Any, kwargs: dict[str, Any], inputs: frozenset[object]) -> None:
        self.function, self.args, self.kwargs, self.inputs = function, args, kwargs, inputs
        self.grad = torch.is_grad_enabled()
        self.rng = RngRecorder()
        self.count = 0
        self.wanted_saved: set[int] = set()
        self.wanted_results: set[int] = set()
        self.recomputed: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] | None = None

    def next_saved(self) -> int:
        self.count += 1
        return self.count - 1

    def result(self, index: int) -> torch.Tensor:
        return self._run()[0][index]

    def saved(self, index: int) -> torch.Tensor:
        """Return the `index`-th tensor that it saves for its own backward."""
        return self._run()[1][index]

    def _run(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        if self.recomputed is None:
            packed: list[torch.Tensor | None] = []

            def pack(x: torch.Tensor) -> None:
                packed.append(x.detach() if len(packed) in self.wanted_saved else None)

            args = _mapped(self.args, _Argument, _Argument.get)
            kwargs = {name: _mapped(value, _Argument, _Argument.get) for name, value in self.kwargs.items()}
            self.args, self.kwargs = (), {}
            with torch.set_grad_enabled(self.grad), saved_tensors_hooks(pack, _no_unpack), self.rng.restored:
                results = self.function(*args, **kwargs)
            assert len(packed) == self.count, f"{self.function} saved {self.count} tensors, {len(packed)} when recomputed"
            saved = {index: x for index, x in enumerate(packed) if x is not None}
            wanted = {index: x.detach() for index, x in enumerate(_tensors(results)) if index in self.wanted_results}
            self.recomputed = wanted, saved
        return self.recomputed


@dataclass(frozen=True, slots=True)
class _RecomputedResult:
    """The storage of a result of a recomputed operation, with the methods of `SavedSpan`."""

    operation: _RecomputedOperation
    index: int
    start: ClassVar[int] = 0

    def covers(self, x: torch.Tensor) -> bool:
        return True

    def store(self) -> None:
        self.operation.wanted_results.add(self.index)

    def result(self) -> torch.Tensor:
        return self.operation.result(self.index)


def _no_unpack(_: None) -> torch.Tensor:
    raise AssertionError("a recomputed operation has no backward of its own")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return an argument with what is of this kind changed."""
    if isinstance(value, kind):
        return change(value)
    return tuple(_mapped(item, kind, change) for item in value) if type(value) in (tuple, list) else value
