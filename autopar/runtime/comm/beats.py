"""The records that heartbeats write to the store and read from it, and the errors that a failed peer causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

COMMUNICATION_ERRORS = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
"""Words in the errors that a failed peer causes."""


class KeyValueStore(Protocol):
    """The methods that a heartbeat needs of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


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
    path: tuple[str, ...] = ()

    def encoded(self) -> str:
        return "\t".join(str(field).replace("\t", " ") for field in (*self[:-1], "|".join(self.path)))

    @staticmethod
    def parse(text: bytes) -> Beat:
        number, entries, state, host, where, backwards, transitions, calls, section, path = text.decode().split("\t")
        counts = int(backwards), int(transitions), int(calls)
        return Beat(int(number), int(entries), state, host, where, *counts, section, tuple(path.split("|") if path else ()))


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


LONGEST_PATH = 32
"""Sections since the last call that are written to the store; longer paths are not compared."""
CALL = ("the check of parameters", "choosing the program of this call")
"""The sections with which a call of the model begins."""


def why_crossed(first: Beat, second: Beat, describe: Callable[[Beat], str]) -> str:
    """Why two ranks that both wait wait for each other: since the last call, they went through other sections. Empty where they
    did not, or may only be apart in time."""
    both = first.path, second.path
    pairs = list(zip(*both, strict=False))
    if not (first.section and second.section) or first.section == second.section or first.calls != second.calls:
        return ""
    if max(map(len, both)) > LONGEST_PATH or all(one == other for one, other in pairs):
        return ""
    odd, other = (first, second) if second.section in CALL else (second, first)
    remedy = f"{odd.section} needs every rank"
    if other.section not in CALL:
        remedy += f", and so does {other.section}"
    return f"{describe(odd)} is {odd.where}, and {describe(other)} {other.where}: {remedy}; take it out of `if rank == 0:`"


def is_communication_error(error: BaseException) -> bool:
    """Whether the error comes from a collective whose peer is gone."""
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
