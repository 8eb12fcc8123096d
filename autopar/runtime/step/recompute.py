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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..compat.autograd import storage_key
from ..compat.collectives import all_gather, wait_tensor
from ..device.axis import AxisHandle
from ..device.offload import HostMemory, OffloadedTensor, storage_span
from ..device.rng import RngRecorder


class PartitionedTensor:
    """The part of a storage that a tensor spans, which all ranks of `axis` hold alike. When autograd first saves a view of it,
    this rank copies its share of the bytes; when the backward first needs one, the shares are gathered. The backward is the same
    on all ranks, so the collectives match."""

    def __init__(self, x: torch.Tensor, axis: AxisHandle) -> None:
        self.axis, self.dtype = axis, x.dtype
        self.start, self.end = storage_span(x)
        self.whole: torch.Tensor | None = x.detach().as_strided((self.end - self.start,), (1,), self.start)
        self.share: torch.Tensor | None = None

    def covers(self, x: torch.Tensor) -> bool:
        start, end = storage_span(x)
        return self.dtype == x.dtype and self.start <= start and end <= self.end

    def store(self) -> None:
        """Copies this rank's share, if that is not done; nothing here refers to the whole tensor then."""
        if self.share is None and self.whole is not None:
            flat, self.whole = self.whole.view(torch.uint8), None
            each = -(-flat.numel() // self.axis.size)
            own = flat[self.axis.coordinate * each : (self.axis.coordinate + 1) * each]
            self.share = torch.cat((own, flat.new_zeros(each - own.numel())))

    def result(self, _: int) -> torch.Tensor:
        """The part as one flat tensor, gathered once."""
        if self.whole is None:
            assert self.share is not None
            flat = wait_tensor(all_gather(self.share, self.axis.size, self.axis.group_name))
            size = (self.end - self.start) * self.dtype.itemsize
            self.whole, self.share = flat.view(-1)[:size].view(self.dtype), None
        return self.whole


Function = Callable[..., Any]
SavedElsewhere = OffloadedTensor | PartitionedTensor


class Recompute:
    """One call of a block: the results of its operations that are not saved on the device, by storage."""

    def __init__(self, host_memory: HostMemory) -> None:
        self.host_memory = host_memory
        self.sources: dict[object, tuple[_RecomputedOperation, int] | SavedElsewhere] = {}
        self.saved: dict[object, list[_SavedTensor]] = {}
        self.running: _RecomputedOperation | None = None
        self.recording = torch.is_grad_enabled()
        self.hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Recompute:
        if self.recording:
            self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.recording:
            self.hooks.__exit__(*error)
        self.sources, self.saved, self.running = {}, {}, None

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, which the backward recomputes. Tensors are arguments, or in tuples of arguments."""
        if not self.recording:
            return function(*args, **kwargs)
        given = (args, tuple(kwargs.values()))
        operation = _RecomputedOperation(
            function,
            _mapped(args, self._as_argument),
            {name: _mapped(value, self._as_argument) for name, value in kwargs.items()},
            frozenset(storage_key(x) for x in _tensors(given)),
        )
        self.running = operation
        try:
            with operation.rng:
                results = function(*args, **kwargs)
        finally:
            self.running = None
        for index, result in enumerate(_tensors(results)):
            key = storage_key(result)
            if key not in operation.inputs:
                self.sources.setdefault(key, (operation, index))
        operation.inputs = frozenset()
        return results

    def offload(self, x: torch.Tensor) -> None:
        """Whatever autograd saves of `x`, before or after this call, is saved in host memory."""
        if self._to_be_saved(x):
            self._save_elsewhere(x, OffloadedTensor(x, self.host_memory))

    def partition(self, x: torch.Tensor, axis: AxisHandle) -> None:
        """Save only a part on each rank of the axis, of whatever autograd saves of `x` before or after this call."""
        if axis.size > 1 and self._to_be_saved(x):
            self._save_elsewhere(x, PartitionedTensor(x, axis))

    def _to_be_saved(self, x: torch.Tensor) -> bool:
        return self.recording and storage_key(x) not in self.sources

    def _save_elsewhere(self, x: torch.Tensor, source: SavedElsewhere) -> None:
        key = storage_key(x)
        self.sources[key] = source
        for saved in self.saved.pop(key, []):
            if isinstance(saved.value, torch.Tensor) and source.covers(saved.value):
                saved.value = _reference(source, 0, saved.value)

    def _source(self, x: torch.Tensor) -> tuple[_RecomputedOperation, int] | SavedElsewhere | None:
        """Return the provider of `x` in the backward, if it is not simply saved."""
        source = self.sources.get(storage_key(x))
        return None if isinstance(source, SavedElsewhere) and not source.covers(x) else source

    def _as_argument(self, x: torch.Tensor) -> _Argument:
        """An operand until the recomputation: without its graph, or a reference to who provides it."""
        source = self._source(x)
        return _Argument(_SavedTensor(x.detach()) if source is None else self._reference(source, x), x.requires_grad)

    def _pack(self, x: torch.Tensor) -> _SavedTensor:
        key, running = storage_key(x), self.running
        index = running.next_saved() if running is not None else 0
        source = self._source(x)
        if source is not None:
            return self._reference(source, x)
        if running is not None and key not in running.inputs:
            running.wanted_saved.add(index)
            return _SavedTensor(_SavedByOperation(running, index))
        saved = _SavedTensor(x)
        self.saved.setdefault(key, []).append(saved)
        return saved

    @staticmethod
    def _reference(source: tuple[_RecomputedOperation, int] | SavedElsewhere, x: torch.Tensor) -> _SavedTensor:
        if isinstance(source, SavedElsewhere):
            return _SavedTensor(_reference(source, 0, x))
        operation, index = source
        operation.wanted_results.add(index)
        return _SavedTensor(_reference(operation, index, x))


class _SavedTensor:
    """The handle that autograd holds in place of a tensor: the tensor, or who provides it."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor | _StorageView | _SavedByOperation) -> None:
        self.value = value

    def get(self) -> torch.Tensor:
        return self.value if isinstance(self.value, torch.Tensor) else self.value.get()


def _unpack(saved: _SavedTensor) -> torch.Tensor:
    return saved.get()


class _StorageView:
    """A view of the storage of a recomputed result, or of an offloaded or partitioned tensor."""

    __slots__ = ("index", "layout", "source")

    def __init__(self, source: _RecomputedOperation | SavedElsewhere, index: int, x: torch.Tensor) -> None:
        self.source, self.index = source, index
        start = source.start if isinstance(source, SavedElsewhere) else 0
        self.layout = tuple(x.shape), x.stride(), x.storage_offset() - start

    def get(self) -> torch.Tensor:
        return self.source.result(self.index).as_strided(*self.layout)


def _reference(source: _RecomputedOperation | SavedElsewhere, index: int, x: torch.Tensor) -> _StorageView:
    if isinstance(source, SavedElsewhere):
        source.store()
    return _StorageView(source, index, x)


class _SavedByOperation:
    """The `index`-th tensor that an operation saved for its own backward."""

    __slots__ = ("index", "operation")

    def __init__(self, operation: _RecomputedOperation, index: int) -> None:
        self.operation, self.index = operation, index

    def get(self) -> torch.Tensor:
        return self.operation.saved(self.index)


class _Argument:
    """A tensor operand, and whether it requires a gradient."""

    __slots__ = ("saved", "requires_grad")

    def __init__(self, saved: _SavedTensor, requires_grad: bool) -> None:
        self.saved, self.requires_grad = saved, requires_grad

    def get(self) -> torch.Tensor:
        return self.saved.get().detach().requires_grad_(self.requires_grad)


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
        return self._run()[1][index]

    def _run(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        if self.recomputed is None:
            packed: list[torch.Tensor | None] = []

            def pack(x: torch.Tensor) -> None:
                packed.append(x.detach() if len(packed) in self.wanted_saved else None)

            args = _mapped(self.args, None)
            kwargs = {name: _mapped(value, None) for name, value in self.kwargs.items()}
            self.args, self.kwargs = (), {}
            with torch.set_grad_enabled(self.grad), saved_tensors_hooks(pack, _no_unpack), self.rng.restored:
                results = self.function(*args, **kwargs)
            assert len(packed) == self.count, f"{self.function} saved {self.count} tensors, {len(packed)} when recomputed"
            saved = {index: x for index, x in enumerate(packed) if x is not None}
            wanted = {index: x.detach() for index, x in enumerate(_tensors(results)) if index in self.wanted_results}
            self.recomputed = wanted, saved
        return self.recomputed


def _no_unpack(_: None) -> torch.Tensor:
    raise AssertionError("a recomputed operation has no backward of its own")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, hold: Callable[[torch.Tensor], _Argument] | None) -> Any:
    """`value` with its tensors replaced by `hold(tensor)`; without `hold`, with held tensors restored."""
    if isinstance(value, torch.Tensor) and hold is not None:
        return hold(value)
    if isinstance(value, _Argument):
        return value.get()
    if type(value) in (tuple, list):
        return tuple(_mapped(item, hold) for item in value)
    return value
