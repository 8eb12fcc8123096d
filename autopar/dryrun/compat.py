"""Every private torch interface that a dry run needs, seen on torch 2.13.0. tests/dryrun/test_compat.py tests each."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError
from autopar.runtime.report.observe import FUNCTIONAL

FakeMode = FakeTensorMode
"""Tensors with shapes and storages but without data."""

COLLECTIVES = {
    **FUNCTIONAL,
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""Operations of ``_c10d_functional`` (the program's) and ``c10d`` (FSDP2's and the buckets') by what they are."""


@contextlib.contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """Make this process one of `size` whose collectives return at once, with nothing sent."""
    if dist.is_initialized():
        raise AutoparError("a dry run plays one rank of another cluster, but this process has joined a group: run it by itself")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The most live bytes, and the operation, the module and the line of the program after which they were live."""

    bytes: int
    operation: int
    function: str
    module: str
    line: str


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage that is live at the peak: bytes, where it was allocated (a line of the program, or a part of torch), and torch's
    word for its use."""

    storage: int
    bytes: int
    allocated_at: str
    use: str


class MemoryWatch(MemTracker):
    """A tracker (torch's) of live storages, which also records where its peak is and what is live there. `_update_peak_stats` is
    called after each operation, `_update_snap` at each change; `_curr_mem_snap` holds bytes per device, `_WINFO` the live
    storages.

    DTensor computes shapes by running operations on tensors of the global size, under whatever fake mode there is; the
    propagator's `_fake_mode_lock` is held then, which tells them from what really runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.peak = MeasuredPeak(0, -1, "", "", "")
        self.at_operation: tuple[int, Callable[[], None]] | None = None
        self.collectives: dict[tuple[str, str], list[int]] = {}
        self._running: Any = None
        self._allocated_at: dict[int, str] = {}
        self._propagating = 0
        self._mod_tracker = _Modules()  # type: ignore[no-untyped-call]
        self._patch = patch.object(ShardingPropagator, "_fake_mode_lock", _Lock(self))

    def __enter__(self) -> Self:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._propagating:
            return func(*args, **(kwargs or {}))
        self._running = func
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if result is not NotImplemented and func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, result)
        return result

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        if module in self.memory_tracking and not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module)  # a program that runs once more, for the next micro-batch: refused otherwise
        super()._pre_fw_hook(module, inputs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Replace torch's, which keeps a table for every module besides."""
        if self._running is torch.ops.prim.device.default:  # allocates nothing, and some of them only the first steps run
            return
        total = self.current_bytes()
        if total > self.peak.bytes:
            self.peak = MeasuredPeak(total, self.operations, str(self._running), self._module(), _line())
        if self.at_operation is not None and self.operations == self.at_operation[0]:
            self.at_operation[1]()
        self.operations += 1

    def _update_snap(self, u_type: Any, winfo: Any, *rest: Any, **more: Any) -> None:
        if u_type.name == "ADD":
            self._allocated_at[id(winfo)] = _line() or f"{self._running}"
        super()._update_snap(u_type, winfo, *rest, **more)

    def current_bytes(self) -> int:
        """Return the bytes of all that is live now."""
        return sum(int(snapshot["Total"]) for snapshot in self._curr_mem_snap.values())

    def live(self) -> list[LiveStorage]:
        """Return every storage that is live now."""
        return [
            LiveStorage(storage._cdata, info.mem_consumed, self._allocated_at.get(id(info), ""), info.reftype.value)
            for storage, (info, _) in self._WINFO.items()
            if info.mem_consumed
        ]

    def start_step(self, forget_peak: bool = False) -> None:
        """Reset the modules (torch refuses a second step otherwise) and the collectives."""
        self.reset_mod_stats()
        if forget_peak:
            self.peak = MeasuredPeak(0, -1, "", "", "")
        self.operations = 0
        self.collectives = {}

    def _module(self) -> str:
        names = [name.partition(".")[2] or name for name in self._mod_tracker.parents if name != "Global"]
        direction = "optimizer" if self._in_opt else "backward" if self._mod_tracker.is_bw else "forward"
        return f"{direction} of {max(names, key=len)}" if names and not self._in_opt else direction

    def _count(self, function: Any, arguments: Any, result: Any) -> None:
        kind = COLLECTIVES.get(function._opname)
        if kind is None:
            return
        tensors = [x for x in tree_leaves((arguments, result)) if isinstance(x, torch.Tensor)]
        entry = self.collectives.setdefault((kind, _group(arguments)), [0, 0])
        entry[0] += 1
        entry[1] += max((x.numel() * x.element_size() for x in tensors), default=0)


class _Modules(ModTracker):
    """The running modules, which torch's tracker drops when a backward ends, also those around it: micro-batches run their
    backward in a forward."""

    def _get_pop_fn(self, w_mod: Any, name: str, is_bw: bool) -> Any:
        pop = super()._get_pop_fn(w_mod, name, is_bw)  # type: ignore[no-untyped-call]
        return pop if is_bw else lambda *args: pop(*args) if name in self.parents else None


@dataclass(frozen=True, slots=True)
class _Lock:
    """A lock that is held while DTensor computes shapes."""

    watch: MemoryWatch

    def __enter__(self) -> None:
        self.watch._propagating += 1

    def __exit__(self, *_: Any) -> None:
        self.watch._propagating -= 1


def _group(arguments: Any) -> str:
    """Return the name of the process group among a collective's arguments: as such, or as a boxed ProcessGroup."""
    for argument in reversed(tree_leaves(arguments)):
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            return argument
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return str(dist.ProcessGroup.unbox(argument).group_name)
    return ""


def _line() -> str:
    """Return the line of the program that runs, or which part of torch or of the runtime does; empty in a plain backward."""
    frame: FrameType | None = sys._getframe(2)
    place = ""
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name.startswith("<autopar program"):
            block = type(frame.f_locals.get("self")).__name__.removeprefix("FSDP")
            return f"{block}: {linecache.getline(name, frame.f_lineno).partition('  #')[0].strip()}"
        for part in ("torch/distributed/fsdp", "torch/optim"):
            if part in name:
                return f"{part} {code.co_name}"
        if "autopar/runtime" in name:
            place = f"autopar/runtime {code.co_name}"
        frame = frame.f_back
    return place
