"""The threads of a heartbeat: one writes this rank's beat to the store of the process group and reads those of others; a second
one, which never touches the store, ends this process where its main thread hangs because another rank failed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import PeerProblem
from .ending import NEVER, end_now, is_late

BEAT_SECONDS = 2.0
WATCHED_RANKS = 8
"""Each rank watches the next ranks, this many: each rank of a lost machine with fewer ranks still has a watcher elsewhere."""
ADVICE = "see its own output, and start all ranks again"


COMMUNICATION_ERRORS = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
"""Words in the errors that a failed peer causes."""


LONGEST_PATH = 32
"""Sections of a path that are written to the store, the last ones."""


class SectionPath(NamedTuple):
    """The sections since the last call that all ranks agreed on: the number of earlier ones, and the names of the last ones."""

    earlier: int = 0
    names: tuple[str, ...] = ()

    def to(self, section: str) -> SectionPath:
        """Return the path with one more section."""
        names = (*self.names, section)
        left_out = max(0, len(names) - LONGEST_PATH)
        return SectionPath(self.earlier + left_out, names[left_out:])

    def leaves(self, other: SectionPath) -> bool:
        """Return whether the two have different sections at one place. Where one only goes on, the other may be late."""
        start = max(self.earlier, other.earlier)
        pairs = zip(self.names[start - self.earlier :], other.names[start - other.earlier :], strict=False)
        return any(here != there for here, there in pairs)


class Beat(NamedTuple):
    """The record that a rank writes to the store: `number` counts its beats, `entries` the watched sections that it entered,
    `backwards` the backwards that it began, `transitions` both. `calls` counts the calls of the model that all ranks have agreed
    on, `path` names the sections since then, and `section` the one that it is in."""

    number: int
    entries: int
    state: str
    host: str
    where: str
    backwards: int = 0
    transitions: int = 0
    calls: int = 0
    section: str = ""
    path: SectionPath = SectionPath()

    def encoded(self) -> str:
        return json.dumps(self)

    @staticmethod
    def parse(text: bytes) -> Beat:
        *fields, (earlier, names) = json.loads(text)
        return Beat(*fields)._replace(path=SectionPath(earlier, tuple(names)))


ALIVE, ENDED, ENDED_INSIDE = "alive", "ended", "ended inside"
"""States of a beat. The last two are of a process that ended as Python ends: after its work, or within a watched section."""


@dataclass
class Seen:
    """The last beat of a rank, when it was new, and since when the rank has neither entered a section nor begun a backward."""

    beat: Beat
    since: float
    unmoved_since: float

    def next(self, beat: Beat, now: float) -> Seen:
        """Return the state with a newer beat."""
        return Seen(beat, now, now if beat.transitions != self.beat.transitions else self.unmoved_since)


CALL = ("the check of parameters", "choosing the program of this call", "comparing the ranks")
"""The sections with which a call of the model begins."""


class Place(NamedTuple):
    """The name of a rank, and its beat where it is now."""

    rank: str
    beat: Beat


def why_crossed(first: Place, second: Place) -> str:
    """Return why two ranks that both wait wait for each other: since the last call, they went through other sections. Empty where
    they did not, or may only be apart in time."""
    one, other = first.beat, second.beat
    if not (one.section and other.section) or one.section == other.section or one.calls != other.calls:
        return ""
    if not one.path.leaves(other.path):
        return ""
    (odd_rank, odd), (rank, beat) = (first, second) if other.section in CALL else (second, first)
    remedy = f"{odd.section} needs every rank"
    if beat.section not in CALL:
        remedy += f", and so does {beat.section}"
    return f"{odd_rank} is {odd.where}, and {rank} {beat.where}: {remedy}; take it out of `if rank == 0:`"


# -- the errors that a failed peer causes


def is_communication_error(error: BaseException) -> bool:
    """Return whether the error comes from a collective whose peer is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in COMMUNICATION_ERRORS)
    )


def own_cause(error: BaseException, rank: int) -> BaseException | None:
    """Return the failure of this rank; None where the error only tells what failed on others, as torch.distributed.checkpoint
    does."""
    if not isinstance(error, CheckpointException):
        return error
    failures = {number: cause for number, (cause, _) in error.failures.items()}
    return failures.get(rank)


class PeerWatch:
    """The threads of one rank, and what they know. `store`: one of torch.distributed, over a connection of its own. `describe`
    names a rank in messages."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        describe: Callable[[int], str],
        patience_seconds: float,
    ) -> None:
        self.store, self.rank, self.describe, self.patience_seconds = store, rank, describe, patience_seconds
        self.prefix = f"autopar/{store.add(f'autopar/heartbeats/{rank}', 1)}"
        self.host, self.process = socket.gethostname(), os.getpid()
        self.watched_ranks = [(rank + step) % size for step in range(1, min(size - 1, WATCHED_RANKS) + 1)]
        self.seen: dict[int, Seen] = {}
        self.step = 0
        self.entries = self.backwards = self.transitions = self.calls = 0
        self.section, self.path = "", SectionPath()
        """The section that the main thread is in, and those since the last call that all ranks agreed on."""
        self.doing: Callable[[], str] | None = None
        """The work of the main thread in a watched section; None between them."""
        self.entered = 0.0
        self.failures: dict[int, str] = {}
        """The sections in which this rank failed, and went on, with the failure in words."""
        self.problem: str | None = None
        self.problem_entry: int | None = None
        """The section in which another rank failed and may go on; None where its process ends."""
        self.problem_since = 0.0
        self.is_public = False
        """The main thread has raised the problem, and has until `ends_by` to end the process in its own way, or to go on without
        this model."""
        self.suspicious = False
        self.lost_since: float | None = None
        self.asking_since: float | None = None
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="autopar heartbeat", daemon=True)
        self.judge = threading.Thread(target=self._judge, name="autopar heartbeat judge", daemon=True)

    @property
    def silence_seconds(self) -> float:
        """A rank without a new beat for so long is given up: half of the patience, less once a collective failed anywhere."""
        return self.patience_seconds / (6 if self.suspicious else 2)

    @property
    def ends_by(self) -> float:
        """The moment of `time.monotonic` by which this process ends because of another rank; `NEVER` where none failed.
        It takes half of the patience, or little more, until a problem is known."""
        return self.problem_since + 0.4 * self.patience_seconds if self.problem is not None else NEVER

    @property
    def where(self) -> str:
        """The work of this rank, with a preposition, for messages."""
        doing = self.doing
        if doing is None:
            return f"after step {self.step}" if self.step else "before the first step"
        return f"in step {self.step}, {doing()}" if self.step else f"while {doing()}"

    def _report(self, key: str, message: str) -> str:
        """Reports a failure; all ranks tell the one that was reported first, which is returned."""
        with suppress(RuntimeError):
            message = self.store.compare_set(f"{self.prefix}/{key}", "", message).decode() or message
            self.store.set(f"{self.prefix}/alarm", "1")
        return message

    # -- the thread that talks to the store

    def _beat(self, number: int, state: str) -> Beat:
        counts = self.backwards, self.transitions, self.calls
        return Beat(number, self.entries, state, self.host, self.where, *counts, self.section, self.path)

    def place(self) -> Place:
        """Return where this rank is."""
        return Place(f"{self.describe(self.rank)} on {self.host}", self._beat(0, ALIVE))

    def _run(self) -> None:
        count = 0
        beat_seconds = min(BEAT_SECONDS, self.patience_seconds / 30)
        while True:
            stopped = self.stopping.wait(beat_seconds if count else 0)
            count += 1
            state = ALIVE if not stopped else ENDED if self.doing is None else ENDED_INSIDE
            self.asking_since = time.monotonic()
            try:
                self.store.set(f"{self.prefix}/beat/{self.rank}", self._beat(count, state).encoded())
                if not stopped and self.problem is None:
                    self._read_peers()
                self.lost_since = None
            except RuntimeError:  # the store is gone, with the process that holds it
                self._without_store()
            self.asking_since = None
            if stopped:
                return

    def _read_peers(self) -> None:
        if self.store.check([f"{self.prefix}/alarm"]):
            self.suspicious = self.suspicious or self.store.check([f"{self.prefix}/suspicion"])
            if self._read_failures():
                return
        now = time.monotonic()
        for rank in self.watched_ranks:
            key = f"{self.prefix}/beat/{rank}"
            last = self.seen.get(rank)
            if last is None and not self.store.check([key]):
                if self.suspicious and self.doing is not None and now - self.entered > self.silence_seconds:
                    self._set_problem(
                        self._report(
                            "failure", f"{self.describe(rank)} is waited for {self.where}, and never came there: {ADVICE}"
                        )
                    )
                continue  # it may still be importing, or building its model
            beat = Beat.parse(self.store.get(key))
            if last is None or last.beat.number != beat.number:
                self.seen[rank] = last = Seen(beat, now, now) if last is None else last.next(beat, now)
            if message := self._why_lost(rank, last, now):
                self._set_problem(self._report("failure", message + self._own_part()))
                return

    def _read_failures(self) -> bool:
        """Take over a failure that was reported: of a process that ends, or in this rank's current or last section."""
        for entry in (None, self.entries, self.entries - 1):
            key = f"{self.prefix}/failure" + ("" if entry is None else f"/{entry}")
            if entry not in self.failures and self.store.check([key]):
                self._set_problem(self.store.get(key).decode(), entry)
                return self.problem is not None
        return False

    def _why_lost(self, rank: int, seen: Seen, now: float) -> str:
        """Return why a rank is given up; empty where it is not."""
        beat = seen.beat
        name = f"{self.describe(rank)} on {beat.host}"
        if beat.state == ALIVE:
            if now - seen.since <= self.silence_seconds:
                return self._why_apart(rank, seen, now)
            return (
                f"{name} has not answered for {now - seen.since:.0f} s, last seen {beat.where}: its process died or is "
                f"stopped; {ADVICE}"
            )
        # A process that ended after its work is no failure, unless this rank still needs it.
        if self.doing is None or not (beat.state == ENDED_INSIDE or beat.entries < self.entries or self.suspicious):
            return ""
        return f"{name} ended its process {beat.where}, others wait for it {self.where}: {ADVICE}"

    def _own_part(self) -> str:
        """Return what this rank did that may have ended another one, for the end of a message; empty where it did nothing."""
        failure = self.failures.get(self.entries) or self.failures.get(self.entries - 1)
        remedy = "a failure of one rank ends the others, so check a batch before the call, and leave it out on all ranks"
        return f"; before that {failure}, and the script went on: {remedy}" if failure else ""

    def _why_apart(self, rank: int, seen: Seen, now: float) -> str:
        """Return why a rank that lives and this one wait for each other; empty where they do not. All ranks go through the same
        sections and backwards in the same order: one that is further in sections and behind in backwards has left a backward
        out."""
        beat, silence = seen.beat, self.silence_seconds
        if self.doing is None or now - self.entered <= silence or now - seen.unmoved_since <= silence:
            return ""
        own, other = self.place(), Place(f"{self.describe(rank)} on {beat.host}", beat)
        if crossed := why_crossed(own, other):
            return crossed
        further, began = beat.entries - self.entries, beat.backwards - self.backwards
        if further * began >= 0:
            return ""
        name, ahead = other if further > 0 else own
        remedy = "call backward on all ranks, or on none"
        if ahead.section not in CALL:
            remedy = f"{ahead.section} and backward need every rank; take them out of `if rank == 0:`"
        return f"{name} has left out a backward that other ranks run, and is {ahead.where}: {remedy}"

    def _set_problem(self, message: str, entry: int | None = None) -> None:
        with self.lock:
            if self.problem is None and (entry is None or entry not in self.failures):
                self.problem, self.problem_since, self.problem_entry = message, time.monotonic(), entry

    def _without_store(self) -> None:
        now = time.monotonic()
        self.lost_since = self.lost_since or now
        if self.doing is not None and now - max(self.lost_since, self.entered) > self.silence_seconds:
            self._set_problem(self._store_lost())

    def _store_lost(self) -> str:
        host = f" on {self.seen[0].beat.host}" if 0 in self.seen else ""
        return f"{self.describe(0)}{host} does not answer, nor does the store of the run: start all ranks again"

    # -- the thread that ends the process

    def _judge(self) -> None:
        tick = min(0.25, self.patience_seconds / 60)
        last = time.monotonic()
        while not self.stopping.wait(tick):
            now = time.monotonic()
            if now - last > self.patience_seconds / 4:  # this process was stopped itself: what it saw is old
                for seen in list(self.seen.values()):
                    seen.since = now
                self.asking_since = self.asking_since and now
            last = now
            asking = self.asking_since
            if self.problem is None and asking is not None and now - asking > self.patience_seconds / 2:
                self._set_problem(self._store_lost())
            grace = self.patience_seconds / (6 if self.doing is not None else 3)
            unheard = self.problem is not None and not self.is_public and now - self.problem_since > grace
            if unheard or now > self.ends_by or is_late():
                end_now(
                    f"{self.describe(self.rank)}: {self.problem or 'other threads hold this process'}", PeerProblem.exit_status
                )
                return
