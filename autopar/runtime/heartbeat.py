"""Notices that another rank died, stopped or failed, and says which: collectives name nobody, or wait for ever.

A thread of each rank counts up a number in the store of the process group, also while the main thread computes or compiles. While
this rank is in a step, the thread watches the numbers of other ranks, and a key that the first failure is written to. Then the
main thread gets an error where it waits in something that ends; where it does not, the process prints the error and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch.distributed as dist

from .compat import own_store
from .errors import BatchProblem, PeerProblem

BEAT_SECONDS = 2.0
WATCHED = 8
"""Each rank watches so many of those behind it: a machine that is lost with fewer ranks has a watcher left for each."""
COMMUNICATION = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
"""Words of errors that another rank causes."""


class Store(Protocol):
    """What this file needs of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


class Heartbeat:
    """Of one rank. `describe` names a rank for a reader. An error names the culprit within `patience_seconds`."""

    def __init__(
        self, store: Store, rank: int, size: int, describe: Callable[[int], str], patience_seconds: float = 60.0
    ) -> None:
        self.store, self.rank, self.describe, self.patience_seconds = store, rank, describe, patience_seconds
        self.prefix = f"autopar/{store.add(f'autopar/heartbeats/{rank}', 1)}"
        self.others = [(rank + step) % size for step in range(1, min(size - 1, WATCHED) + 1)]
        self.seen: dict[int, tuple[bytes, float]] = {}
        self.entered: float | None = None
        self.problem: str | None = None
        self.suspicious = False
        self.lost_since: float | None = None
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run, name="autopar heartbeat", daemon=True)

    @property
    def silence_seconds(self) -> float:
        """Without a new number for so long, a rank is given up: half of the patience, less once something failed anywhere."""
        return self.patience_seconds / (6 if self.suspicious else 2)

    @contextlib.contextmanager
    def watching(self, doing: Callable[[], str]) -> Iterator[None]:
        """Around what needs the other ranks. PeerProblem where one of them failed."""
        if self.problem is not None:
            raise PeerProblem(self.problem)
        self.entered = time.monotonic()
        try:
            yield
        except Exception as error:
            if isinstance(error, BatchProblem):  # on all ranks alike, before anything is sent
                raise
            if not _is_communication(error):
                text = str(error).strip().partition("\n")[0]
                self._fail(f"{self.describe(self.rank)} failed in {doing()}: {type(error).__name__}: {text}")
                raise
            self._ask(error)
            raise
        finally:
            self.entered = None

    def close(self) -> None:
        """Ends the thread."""
        self.ending.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(BEAT_SECONDS)

    # -- the main thread, after an error

    def _ask(self, error: Exception) -> None:
        """Waits until it is known who is to blame."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{self.prefix}/suspicion", str(self.rank))
        self.suspicious = True
        until = time.monotonic() + self.patience_seconds
        while self.problem is None and time.monotonic() < until:
            time.sleep(0.05)
        if self.problem is not None:
            raise PeerProblem(self.problem) from error

    def _fail(self, message: str) -> None:
        """The first failure is the one that all ranks tell."""
        with contextlib.suppress(RuntimeError):
            message = self.store.compare_set(f"{self.prefix}/failure", "", message).decode() or message
        self.problem = message

    # -- the thread

    def _run(self) -> None:
        count = 0
        beat_seconds = min(BEAT_SECONDS, self.patience_seconds / 30)
        while not self.ending.wait(beat_seconds):
            count += 1
            try:
                self.store.set(f"{self.prefix}/beat/{self.rank}", str(count))
                self.lost_since = None
                if self.entered is not None and self.problem is None:
                    self._look(self.entered)
            except RuntimeError:  # the store is gone, with the process that holds it
                self._without_store()
            if self.problem is not None:
                self._end(self.patience_seconds / 12)
                return

    def _look(self, entered: float) -> None:
        failure = f"{self.prefix}/failure"
        if self.store.check([failure]):
            self.problem = self.store.get(failure).decode()
            return
        self.suspicious = self.suspicious or self.store.check([f"{self.prefix}/suspicion"])
        now = time.monotonic()
        for rank in self.others:
            key = f"{self.prefix}/beat/{rank}"
            number = self.store.get(key) if self.store.check([key]) else b""
            known = self.seen.get(rank)
            if known is None or known[0] != number or known[1] < entered:
                self.seen[rank] = number, now
            elif now - known[1] > self.silence_seconds:
                self._fail(
                    f"{self.describe(rank)} has not answered for {now - known[1]:.0f} s: its process died or is stopped; "
                    "see its own output, and start all ranks again"
                )
                return

    def _without_store(self) -> None:
        now = time.monotonic()
        self.lost_since = self.lost_since or now
        if self.entered is not None and now - max(self.lost_since, self.entered) > self.silence_seconds:
            self.problem = f"{self.describe(0)} does not answer, nor does the store of the run: start all ranks again"

    def _end(self, grace_seconds: float) -> None:
        """The main thread may yet raise; what waits in a collective for ever does not."""
        until = time.monotonic() + grace_seconds
        while self.entered is not None and time.monotonic() < until:
            if self.ending.wait(0.05):
                return
        if self.entered is not None:
            print(f"{self.describe(self.rank)}: {self.problem}", file=sys.stderr, flush=True)
            os._exit(PeerProblem.exit_status)


def _is_communication(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in COMMUNICATION)
    )


def begin(owner: object, describe: Callable[[int], str], patience_seconds: float) -> Heartbeat | None:
    """The heartbeat of this process, which ends with `owner`. None where there are no others. All ranks must call."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    heartbeat = Heartbeat(own_store(), dist.get_rank(), dist.get_world_size(), describe, patience_seconds)
    weakref.finalize(owner, heartbeat.close)
    heartbeat.thread.start()
    return heartbeat
