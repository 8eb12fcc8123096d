"""Notices that another rank died, stopped or failed, and names it: collectives alone name nobody, or hang for ever.

A thread of each rank increments a counter in the process group's store, also while the main thread computes or compiles. While
this rank is in a step, the thread watches the counters of other ranks, and a key to which the first failure is written. Then the
main thread raises an error if what it waits in returns; if it does not, the process prints the error and ends."""

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

from ..compat import own_store
from ..errors import BatchProblem, PeerProblem

BEAT_SECONDS = 2.0
WATCHED_RANKS = 8
"""Each rank watches the next ranks, this many: each rank of a lost machine with fewer ranks still has a watcher elsewhere."""
COMMUNICATION_ERRORS = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
"""Words in the errors that a failed peer causes."""


class KeyValueStore(Protocol):
    """The methods that a heartbeat needs of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


class Heartbeat:
    """The heartbeat of one rank. `describe` names a rank in messages. An error names the failed rank within
    `patience_seconds`."""

    def __init__(
        self, store: KeyValueStore, rank: int, size: int, describe: Callable[[int], str], patience_seconds: float = 60.0
    ) -> None:
        self.store, self.rank, self.describe, self.patience_seconds = store, rank, describe, patience_seconds
        self.prefix = f"autopar/{store.add(f'autopar/heartbeats/{rank}', 1)}"
        self.watched_ranks = [(rank + step) % size for step in range(1, min(size - 1, WATCHED_RANKS) + 1)]
        self.last_beats: dict[int, tuple[bytes, float]] = {}
        self.step_started: float | None = None
        self.problem: str | None = None
        self.suspicious = False
        self.lost_since: float | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="autopar heartbeat", daemon=True)

    @property
    def silence_seconds(self) -> float:
        """A rank without a new count for so long is given up: half of the patience, less once a collective failed anywhere."""
        return self.patience_seconds / (6 if self.suspicious else 2)

    @contextlib.contextmanager
    def watching(self, doing: Callable[[], str]) -> Iterator[None]:
        """A context around work that needs the other ranks. PeerProblem where one of them failed."""
        if self.problem is not None:
            raise PeerProblem(self.problem)
        self.step_started = time.monotonic()
        try:
            yield
        except Exception as error:
            if isinstance(error, BatchProblem):  # raised on all ranks alike, before any communication
                raise
            if not _is_communication(error):
                text = str(error).strip().partition("\n")[0]
                self._report_failure(f"{self.describe(self.rank)} failed in {doing()}: {type(error).__name__}: {text}")
                raise
            self._wait_for_culprit(error)
            raise
        finally:
            self.step_started = None

    def close(self) -> None:
        """Stops the thread."""
        self.stopping.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(BEAT_SECONDS)

    # -- the main thread, after an error

    def _wait_for_culprit(self, error: Exception) -> None:
        """Waits until the failed rank is known."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{self.prefix}/suspicion", str(self.rank))
        self.suspicious = True
        until = time.monotonic() + self.patience_seconds
        while self.problem is None and time.monotonic() < until:
            time.sleep(0.05)
        if self.problem is not None:
            raise PeerProblem(self.problem) from error

    def _report_failure(self, message: str) -> None:
        """Reports a failure; all ranks raise the one that was reported first."""
        with contextlib.suppress(RuntimeError):
            message = self.store.compare_set(f"{self.prefix}/failure", "", message).decode() or message
        self.problem = message

    # -- the thread

    def _run(self) -> None:
        count = 0
        beat_seconds = min(BEAT_SECONDS, self.patience_seconds / 30)
        while not self.stopping.wait(beat_seconds):
            count += 1
            try:
                self.store.set(f"{self.prefix}/beat/{self.rank}", str(count))
                self.lost_since = None
                if self.step_started is not None and self.problem is None:
                    self._check_peers(self.step_started)
            except RuntimeError:  # the store is gone, with the process that holds it
                self._without_store()
            if self.problem is not None:
                self._exit_process(self.patience_seconds / 12)
                return

    def _check_peers(self, entered: float) -> None:
        failure = f"{self.prefix}/failure"
        if self.store.check([failure]):
            self.problem = self.store.get(failure).decode()
            return
        self.suspicious = self.suspicious or self.store.check([f"{self.prefix}/suspicion"])
        now = time.monotonic()
        for rank in self.watched_ranks:
            key = f"{self.prefix}/beat/{rank}"
            number = self.store.get(key) if self.store.check([key]) else b""
            known = self.last_beats.get(rank)
            if known is None or known[0] != number or known[1] < entered:
                self.last_beats[rank] = number, now
            elif now - known[1] > self.silence_seconds:
                self._report_failure(
                    f"{self.describe(rank)} has not answered for {now - known[1]:.0f} s: its process died or is stopped; "
                    "see its own output, and start all ranks again"
                )
                return

    def _without_store(self) -> None:
        now = time.monotonic()
        self.lost_since = self.lost_since or now
        if self.step_started is not None and now - max(self.lost_since, self.step_started) > self.silence_seconds:
            self.problem = f"{self.describe(0)} does not answer, nor does the store of the run: start all ranks again"

    def _exit_process(self, grace_seconds: float) -> None:
        """Gives the main thread time to raise; ends the process where it hangs in a collective."""
        until = time.monotonic() + grace_seconds
        while self.step_started is not None and time.monotonic() < until:
            if self.stopping.wait(0.05):
                return
        if self.step_started is not None:
            print(f"{self.describe(self.rank)}: {self.problem}", file=sys.stderr, flush=True)
            os._exit(PeerProblem.exit_status)


def _is_communication(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in COMMUNICATION_ERRORS)
    )


def start_heartbeat(owner: object, describe: Callable[[int], str], patience_seconds: float) -> Heartbeat | None:
    """Starts the heartbeat of this process; it stops with `owner`. None where there are no other ranks. All ranks must call."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    heartbeat = Heartbeat(own_store(), dist.get_rank(), dist.get_world_size(), describe, patience_seconds)
    weakref.finalize(owner, heartbeat.close)
    heartbeat.thread.start()
    return heartbeat
