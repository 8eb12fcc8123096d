"""Notices that another rank died, stopped or failed, and names it: collectives alone name nobody, or hang for ever.

One thread of each rank writes a beat to the process group's store, also while the main thread computes, compiles, plans or waits:
only a process that died or is stopped stops beating. It reads the beats of other ranks, and what failures were reported. A second
thread, which never touches the store, ends the process where the main thread hangs: soon where it is in work that needs the other
ranks (`Heartbeat.watching`, and the backward of a loss), later where it is between two steps, in the user's own code.

Both threads are in `peer_watch`; here is what the main thread does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..compat.autograd import at_end_of_backward, in_backward
from ..compat.collectives import own_store
from ..device.groups import several_ranks
from ..device.mesh import STARTED, join_process_group
from ..device.rendezvous import JOIN_SECONDS, Meeting
from ..errors import PeerProblem, RuntimeProblem
from .ending import NEVER, lengthen_patience, uncaught
from .peer_watch import BEAT_SECONDS, PeerWatch, Place, SectionPath, is_communication_error, own_cause

PATIENCE_SECONDS = 30.0
"""The time-out: within so long every rank ends with the name of one that failed. (Shares of it are in `peer_watch`.)"""


class Heartbeat(PeerWatch):
    """The heartbeat of one rank. An error names the failed rank within `patience_seconds`."""

    finalizer: Any = None

    def start(self) -> None:
        """Start the threads. Hooks that tell it of exceptions which end this process, or a backward, are in `runtime.patches`."""
        _ALL.add(self)
        STARTED.add(self)
        lengthen_patience(self.patience_seconds)
        self.thread.start()
        self.judge.start()

    def stop_with(self, owner: object) -> None:
        """The heartbeat stops when `owner` is collected, or when Python ends."""
        reference = weakref.ref(owner)

        def stop() -> None:
            if reference() is None:  # collected while this rank glanced at a tensor of another model: it is in no section
                self._leave()
            self.close()

        if self.finalizer is not None:
            self.finalizer.detach()
        self.finalizer = weakref.finalize(owner, stop)

    def close(self) -> None:
        """Tell the others that this rank ends, and stop the threads."""
        if os.getpid() != self.process:  # a fork, which has neither the threads nor the connection
            return
        self.stopping.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(BEAT_SECONDS)

    # -- the main thread

    @contextlib.contextmanager
    def watching(self, doing: Callable[[], str], section: str = "") -> Iterator[None]:
        """A context around work that needs the other ranks, which all enter it (`section`: its name, where `doing` says more).
        PeerProblem where one of them failed."""
        self._raise_problem(None)
        outer = (self.doing, self.section) if in_backward() else (None, "")
        self.entries += 1
        self._enter(doing, section or doing())
        self.path = self.path.to(self.section)
        try:
            yield
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self.doing, self.section = outer

    def agreed(self) -> None:
        """All ranks have come to one call of the model."""
        self.calls, self.path = self.calls + 1, SectionPath()

    @contextlib.contextmanager
    def glancing(self, section: str) -> Iterator[None]:
        """A context around what one rank may do alone, and waits in where it needs others."""
        before = self.path
        self._enter(lambda: section, section)
        self.path = before.to(section)
        try:
            yield
        finally:
            self._leave()
            self.path = before

    def watch_backward(self, loss: torch.Tensor) -> None:
        """The backward of `loss` is watched, from its first node until its gradients are delivered."""

        def begin(*_: Any) -> None:
            self.backwards += 1
            self._enter(lambda: "backward", "")
            # Callbacks run in the order of their registration: one that is registered by another comes after FSDP2's and the
            # buckets', which wait for their collectives.
            at_end_of_backward(lambda: at_end_of_backward(self._leave))

        if loss.grad_fn is not None:
            loss.grad_fn.register_prehook(begin)

    def backward_failed(self, error: Exception) -> None:
        """Report an exception that ends a backward of `watch_backward`. PeerProblem where another rank caused it."""
        # a section reports what leaves it: errors of backwards in planning are caught there
        if self.doing is None or self.section or in_backward() or os.getpid() != self.process:
            return
        try:
            self._failed(error)
        finally:
            self._leave()

    def process_failed(self, error: BaseException) -> None:
        """Report an exception that ends this process."""
        if not self.thread.is_alive() or os.getpid() != self.process or isinstance(error, PeerProblem):
            return
        cause = own_cause(error, self.rank)
        if cause is not None and not is_communication_error(cause):
            self._report("failure", self._own_failure(cause))
            self.is_public = True
        elif not self.is_public:
            self._await_culprit()
            if self.problem is not None:
                self.is_public = True
                print(f"{self.describe(self.rank)}: {self.problem}", file=sys.stderr, flush=True)

    def _enter(self, doing: Callable[[], str], section: str) -> None:
        self.entered = time.monotonic()
        self.transitions += 1
        self.doing, self.section = doing, section

    def _leave(self) -> None:
        self.doing, self.section = None, ""

    def _failed(self, error: Exception) -> None:
        """An error in a watched section."""
        if isinstance(error, RuntimeProblem) and error.on_all_ranks:
            return
        if is_communication_error(error):
            self._await_culprit()
            self._raise_problem(error)
            return
        message = self._own_failure(error)
        with self.lock:  # where all ranks fail alike and go on, this is no failure of another rank
            self.failures[self.entries] = message
            if self.problem_entry in self.failures:
                self.problem = self.problem_entry = None
        self._report(f"failure/{self.entries}", message)

    def _own_failure(self, error: BaseException) -> str:
        """The failure in words. They stay with the error, which may leave the section before it ends the process."""
        text = str(error).strip().partition("\n")[0]
        message = f"{self.describe(self.rank)} on {self.host} failed {self.where}: {type(error).__name__}: {text}"
        failure: str = error.__dict__.setdefault("autopar_failure", message)
        return failure

    def _raise_problem(self, cause: Exception | None) -> None:
        if self.problem is not None:
            self.is_public = True
            raise PeerProblem(self.problem) from cause

    def _await_culprit(self) -> None:
        """Wait until the failed rank is known."""
        self.suspicious = True
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{self.prefix}/suspicion", str(self.rank))
            self.store.set(f"{self.prefix}/alarm", "1")
        until = time.monotonic() + self.patience_seconds
        while self.problem is None and time.monotonic() < until:
            time.sleep(0.05)


_ALL: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


@contextlib.contextmanager
def glancing(section: str) -> Iterator[None]:
    """Enter `Heartbeat.glancing` of each model that does nothing now, in the main thread: of a tensor that may be any model's."""
    alone = threading.current_thread() is threading.main_thread() and not in_backward()
    with contextlib.ExitStack() as stack:
        for each in list(_ALL) if alone else ():
            if each.doing is None and each.process == os.getpid():
                stack.enter_context(each.glancing(section))
        yield


def present_place() -> Place | None:
    """Return where the main thread is, in the section that it entered last; None in another thread, or where it is in none."""
    inside = [each for each in list(_ALL) if each.doing is not None and each.section and each.process == os.getpid()]
    if threading.current_thread() is not threading.main_thread() or not inside:
        return None
    return max(inside, key=lambda heartbeat: heartbeat.entered).place()


def ends_by() -> float:
    """Return the moment by which this process has to have ended because of a problem of another rank."""
    return min((heartbeat.ends_by for heartbeat in list(_ALL)), default=NEVER)


def report_uncaught(
    usual: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Handle an uncaught exception as `usual` does, then tell each heartbeat."""
    if kind is KeyboardInterrupt and (own := _interrupted()):
        print(own, file=sys.stderr, flush=True)
    else:
        usual(kind, error, trace)
    uncaught()
    for heartbeat in list(_ALL):
        heartbeat.process_failed(error)


def _interrupted() -> str:
    """Return one line for Ctrl-C, which every rank gets: their tracebacks together are a page. A second Ctrl-C, or the
    launcher's, does not interrupt what is done at the end. Empty where no heartbeat runs."""
    heartbeat = next((each for each in list(_ALL) if each.process == os.getpid()), None)
    if heartbeat is None:
        return ""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return f"{heartbeat.describe(heartbeat.rank)}: interrupted {heartbeat.where}"


def report_failed_backward(error: Exception) -> PeerProblem | None:
    """Tell each heartbeat that watches a backward of an exception that ends one. Return the problem of another rank that caused
    it."""
    for heartbeat in list(_ALL):
        try:
            heartbeat.backward_failed(error)
        except PeerProblem as problem:
            return problem
    return None


def start_heartbeat(describe: Callable[[int], str], patience_seconds: float = PATIENCE_SECONDS) -> Heartbeat | None:
    """Start the heartbeat of this process. None where there are no other ranks. All ranks must call."""
    if not several_ranks():
        return None
    heartbeat = Heartbeat(own_store(), dist.get_rank(), dist.get_world_size(), describe, patience_seconds)
    heartbeat.start()
    return heartbeat


def watched(heartbeat: Heartbeat | None, doing: str) -> contextlib.AbstractContextManager[None]:
    """Return `Heartbeat.watching`, where there is a heartbeat; else a context that does nothing."""
    return contextlib.nullcontext() if heartbeat is None else heartbeat.watching(lambda: doing)


def join(
    size: int,
    axes: Mapping[str, int],
    describe: Callable[[int], str],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    join_seconds: float = JOIN_SECONDS,
) -> Heartbeat | None:
    """Join the process group unless this process has; the heartbeat, None where there are no other ranks. LaunchProblem where
    another number of processes was launched, or one does not come within `join_seconds`; PeerProblem where one fails."""
    started: list[Heartbeat] = []

    @contextmanager
    def connecting(meeting: Meeting) -> Iterator[None]:
        if meeting.size == 1:
            yield
            return
        heartbeat = Heartbeat(meeting.store.clone(), meeting.rank, meeting.size, describe, patience_seconds)
        heartbeat.start()
        try:
            with heartbeat.watching(lambda: "joining the process group"):
                yield
        except BaseException:
            heartbeat.close()
            raise
        started.append(heartbeat)

    join_process_group(size, axes, join_seconds=join_seconds, connecting=connecting)
    return started[0] if started else start_heartbeat(describe, patience_seconds)
