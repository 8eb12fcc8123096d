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
    """What a rank writes to the store: `number` counts its beats, `entries` the watched sections that it entered."""

    number: int
    entries: int
    state: str
    host: str
    where: str

    def encoded(self) -> str:
        return "\t".join(str(field).replace("\t", " ") for field in self)

    @staticmethod
    def parse(text: bytes) -> Beat:
        number, entries, state, host, where = text.decode().split("\t")
        return Beat(int(number), int(entries), state, host, where)


ALIVE, ENDED, ENDED_INSIDE = "alive", "ended", "ended inside"
"""States of a beat. The last two are of a process that ended as Python ends: after its work, or within a watched section."""


@dataclass
class Seen:
    """The last beat of a rank, and when it was new."""

    beat: Beat
    since: float


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
