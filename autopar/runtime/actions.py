"""The text of a pipeline's schedule: one rank's actions, in the order in which it takes them.

| text | action |
|---|---|
| ``0F3`` | forward of micro-batch 3 on chunk 0 |
| ``0B3`` | its backward |
| ``0I3``, ``0W3`` | the backward in two: gradients of the inputs, gradients of the weights |
| ``0SEND_F3``, ``1RECV_F3`` | the results of chunk 0 go to chunk 1, which posts their receive |
| ``1SEND_B3``, ``0RECV_B3`` | the gradients of chunk 1's inputs go to chunk 0 |
| ``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD`` | the weights of chunk 0 are gathered, dropped; their gradients are reduced |
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import RuntimeProblem

COMPUTE = ("F", "B", "I", "W")
BACKWARD = ("B", "I", "W")
FORWARD_ONLY = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|(\d+)(UNSHARD|RESHARD|REDUCE_GRAD)")


class Action(NamedTuple):
    """`micro_batch` is -1 where there is none."""

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"


def parse(text: str) -> tuple[Action, ...]:
    """The actions of one rank. RuntimeProblem for a word that is none."""
    return tuple(_action(word) for word in text.split())


def _action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise RuntimeProblem(f"{word!r} is not an action of a schedule; write for example 0F3, 1RECV_F3 or 0REDUCE_GRAD")
    chunk, kind, number, other, zero = found.groups()
    return Action(int(chunk), kind, int(number)) if kind else Action(int(other), zero, -1)
