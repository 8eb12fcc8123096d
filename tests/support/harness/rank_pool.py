"""A pool of gloo processes that lives as long as the pytest session: a set per world size, forked at first use.

``pool.run(function, *args, world=4)`` runs a module-level function on every rank and gives the list of its results by rank.
Arguments and results travel by pickle (CPU tensors by value). A rank that raises makes `run` raise `RankError` with the rank's
traceback; a rank that hangs or dies does too, after `timeout` seconds, and that set of processes starts anew.
``pool.run_alone(function, *args)`` gives the result of one process that belongs to no group and ends then.

Functions of test modules are found by their file, under the name that pytest gives it, so that a model of a test is the same here
and there (`support.capture_cache`).
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import io
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from support.garbage import collect_seldom
from support.harness.fork_server import ForkServer

ROOT = Path(__file__).parents[3]


MOST_GROUPS = 45
"""Process groups of gloo, which programs make and nothing destroys: with more of them a set of ranks is slower than a new one."""


class RankError(AssertionError):
    """A rank failed; the text is its traceback."""


class RankCrash(RankError):
    """A process of the pool crashed in C++. Once in some ten thousand runs, a thread of gloo (``pt_gloo_runloop``) found a broken
    heap in malloc, for a reason that is not known: the processes of the pool live long, and anything before may be the cause.
    Such a run is made again, once, with a warning; faulthandler writes to stderr where each thread was."""


class RankPool:
    """The pool. `close` ends its processes. One beside another forks from the same `template`, which the other ends."""

    def __init__(self, template: ForkServer | None = None) -> None:
        self.template, self.sets = template or ForkServer(), dict[int, _Processes]()
        self._owns_template = template is None
        self._store: Any = None
        self._numbers = count()

    @property
    def store_port(self) -> int:
        """Of a store in this process, where ranks find each other."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def run(
        self, function: Callable[..., Any] | str, *args: Any, world: int = 4, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Results by rank. `function` is one of a module, or ``"path/file.py:name"`` (relative to the repository)."""
        try:
            return self._run(function, args, kwargs, world, timeout)
        except RankCrash as crash:
            warnings.warn(f"{_address(function)} is run again, since {crash}", stacklevel=2)
            return self._run(function, args, kwargs, world, timeout)

    def _run(
        self, function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any], world: int, timeout: float
    ) -> list[Any]:
        processes = self.sets.get(world)
        if processes is None or not processes.alive():
            processes = self.sets[world] = _Processes(self, world)
        try:
            answers = processes.run(_address(function), args, kwargs, timeout)
        except RankError:
            processes.close()
            del self.sets[world]
            raise
        if processes.groups > MOST_GROUPS:
            processes.close()
            del self.sets[world]
        return answers

    def run_alone(self, function: Callable[..., Any] | str, *args: Any, timeout: float = 60.0, **kwargs: Any) -> Any:
        """Result of one new process without a group."""
        processes = _Processes(self, 0)
        try:
            return processes.run(_address(function), args, kwargs, timeout)[0]
        finally:
            processes.close()

    def close(self) -> None:
        """Ends all processes."""
        for processes in self.sets.values():
            processes.close()
        self.sets.clear()
        if self._owns_template:
            self.template.close()


def _address(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        path, _, name = function.partition(":")
        return f"{ROOT / path}:{name}"
    if "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not a function of a module, so other processes cannot find it")
    if function.__module__.startswith("support."):  # ranks know these by the same name
        return f"{function.__module__}:{function.__name__}"
    return f"{function.__code__.co_filename}:{function.__name__}"


class _Pickler(pickle.Pickler):
    """Sends functions and classes of test modules by file, since their modules may not be imported elsewhere."""

    def reducer_override(self, value: Any) -> Any:
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        path = getattr(module, "__file__", None)
        named = isinstance(value, type) or (callable(value) and hasattr(value, "__code__"))
        named = named and not value.__module__.startswith("support.")  # ranks know these by the same name
        if named and path and str(path).startswith(str(ROOT / "tests")) and "." not in value.__qualname__:
            return _load, (f"{path}:{value.__name__}",)
        return NotImplemented


def dumps(value: Any) -> bytes:
    """Pickle of `value`."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def _load(address: str) -> Any:
    """What ``file.py:name`` or ``module:name`` is in this process."""
    path, _, name = address.rpartition(":")
    if not path.endswith(".py"):
        return getattr(importlib.import_module(path), name)
    with _LOADING:  # answers of all ranks are read at once
        return getattr(_module_of(path), name)


_LOADING = threading.RLock()


def _module_of(path: str) -> ModuleType:
    file = Path(path)
    key = ".".join(file.relative_to(ROOT).with_suffix("").parts) if file.is_relative_to(ROOT) else path
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None, path
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class _Processes:
    """`world` processes that share one default process group; one without a group where `world` is 0."""

    def __init__(self, pool: RankPool, world: int) -> None:
        store = pool.store_port if world else 0
        number, self.groups = next(pool._numbers), 0
        self.processes = [
            pool.template.fork(
                "support.harness.rank_pool:serve", rank, world, store, number,
                environment={"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"} if world else {},
            )
            for rank in range(world or 1)
        ]  # fmt: skip

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def run(self, address: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        message = dumps((address, args, kwargs))
        answers: list[tuple[bool, Any, int] | None] = [None] * len(self.processes)
        failed = threading.Event()

        def ask(rank: int) -> None:
            process = self.processes[rank]
            try:
                _write(process.stdin, message)
                answers[rank] = pickle.loads(_read(process.stdout))
            except (OSError, EOFError):
                answers[rank] = (False, f"the process of rank {rank} ended with status {process.wait()}", 0)
            if not answers[rank] or not answers[rank][0]:  # type: ignore[index]
                failed.set()

        threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in range(len(self.processes))]
        for thread in threads:
            thread.start()
        waited = 0.0
        while any(thread.is_alive() for thread in threads) and waited < timeout:
            next(thread for thread in threads if thread.is_alive()).join(0.25)
            waited += 0.25
            if failed.is_set():  # the others may wait for the failed rank forever; give them a moment to fail by themselves
                timeout = min(timeout, waited + 1)
        bad = [(rank, answer[1]) for rank, answer in enumerate(answers) if answer is not None and not answer[0]]
        if bad:
            crashed = any(
                f"status -{number:d}" in text for _, text in bad for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
            )
            kind = RankCrash if crashed else RankError
            raise kind("\n".join(f"rank {rank}: {text}" for rank, text in bad))
        late = [rank for rank, answer in enumerate(answers) if answer is None]
        if late:
            for rank in late:
                os.kill(self.processes[rank].pid, signal.SIGABRT)  # faulthandler writes to stderr where each thread is
            time.sleep(0.5)
            raise RankError(f"ranks {late} gave no answer for {address} within {timeout:g} s")
        self.groups = max(answer[2] for answer in answers if answer is not None)
        return [answer[1] for answer in answers if answer is not None]

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def _write(pipe: BinaryIO | Any, message: bytes) -> None:
    pipe.write(len(message).to_bytes(8, "little"))
    pipe.write(message)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> bytes:
    size = pipe.read(8)
    if len(size) < 8:
        raise EOFError
    return bytes(pipe.read(int.from_bytes(size, "little")))


def share_gloo_device() -> None:
    """From now on, all groups of gloo in this process have one device: each has a thread, which wakes 100 times a second, whether
    there is something to send or not, and a rank may have 45 groups. Seen on 2.13.0."""
    from torch.distributed import distributed_c10d

    device = distributed_c10d.ProcessGroupGloo.create_default_device()

    class OnOneDevice(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = self._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]


def end_heartbeats() -> None:
    """Those of the parallel models of a run: each has two threads, and the models are garbage that is not collected for long."""
    from autopar.runtime.device.mesh import STARTED

    for started in list(STARTED):
        started.close()


def serve(rank: int, world: int, port: int, number: int) -> None:
    """The loop of one rank of the set of that number. What functions print goes to stderr; stdout carries the answers."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()  # a rank that crashes in C++ says where
    import torch
    import torch.distributed as dist

    from support.capture_cache import capture_cache
    from support.seeds import seed_the_processor_alone

    torch.set_num_threads(1)
    seed_the_processor_alone()
    collect_seldom()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # several gathers where one would do: so be it
    if world:
        share_gloo_device()
        store = dist.PrefixStore(f"set {number}", dist.TCPStore("localhost", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        try:
            message = _read(inbox)
        except EOFError:
            os._exit(0)
        try:
            address, args, kwargs = pickle.loads(message)
            torch.manual_seed(0)  # what ran before on this rank alone, which xdist decides by time, is not seen
            with capture_cache():
                value = _load(address)(*args, **kwargs)
            groups = len(dist.distributed_c10d._world.pg_map) if world else 0
            answer = dumps((True, value, groups))
        except BaseException:
            answer = dumps((False, traceback.format_exc(), 0))
        end_heartbeats()
        _write(outbox, answer)
