"""What heartbeats write to the store and read from it, and which errors a failed peer causes."""

from __future__ import annotations

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
    """What a rank writes to the store: `number` counts its beats, `entries` the watched sections that it entered,
    `backwards` the backwards that it began."""

    number: int
    entries: int
    state: str
    host: str
    where: str
    backwards: int = 0

    def encoded(self) -> str:
        return "\t".join(str(field).replace("\t", " ") for field in self)

    @staticmethod
    def parse(text: bytes) -> Beat:
        number, entries, state, host, where, backwards = text.decode().split("\t")
        return Beat(int(number), int(entries), state, host, where, int(backwards))


ALIVE, ENDED, ENDED_INSIDE = "alive", "ended", "ended inside"
"""States of a beat. The last two are of a process that ended as Python ends: after its work, or within a watched section."""


@dataclass
class Seen:
    """The last beat of a rank, when it was new, and since when the rank has neither entered a section nor begun a backward."""

    beat: Beat
    since: float
    unmoved_since: float

    def next(self, beat: Beat, now: float) -> Seen:
        """With a newer beat."""
        moved = (beat.entries, beat.backwards) != (self.beat.entries, self.beat.backwards)
        return Seen(beat, now, now if moved else self.unmoved_since)


def is_communication_error(error: BaseException) -> bool:
    """Whether the error comes from a collective whose peer is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in COMMUNICATION_ERRORS)
    )


def own_cause(error: BaseException, rank: int) -> BaseException | None:
    """What failed on this rank; None where the error only tells what failed on others, as torch.distributed.checkpoint does."""
    if not isinstance(error, CheckpointException):
        return error
    failures = {number: cause for number, (cause, _) in error.failures.items()}
    return failures.get(rank)
