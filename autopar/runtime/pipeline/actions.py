"""The text of a pipeline schedule: the actions of one rank, in the order in which it runs them (torch's notation).

| text | action |
|---|---|
| ``0F3`` | forward of micro-batch 3 on model chunk 0 |
| ``0B3`` | its backward |
| ``0I3``, ``0W3`` | the split backward: gradients of the inputs, gradients of the weights |
| ``0SEND_F3``, ``1RECV_F3`` | chunk 0 sends its results; chunk 1 posts their receive |
| ``1SEND_B3``, ``0RECV_B3`` | chunk 1 sends the gradients of its inputs; chunk 0 posts their receive |
| ``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD`` | all-gather the weights of chunk 0, free them; reduce-scatter their gradients |
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import RuntimeProblem

COMPUTE = ("F", "B", "I", "W")
BACKWARD = ("B", "I", "W")
FORWARD_ONLY = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|(\d+)(UNSHARD|RESHARD|REDUCE_GRAD)")


class RankAction(NamedTuple):
    """One action of one rank; `micro_batch` is -1 if it has none."""

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"


def parse_actions(text: str) -> tuple[RankAction, ...]:
    """The actions of one rank. RuntimeProblem for a word that is not an action."""
    return tuple(_action(word) for word in text.split())


def _action(word: str) -> RankAction:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise RuntimeProblem(f"{word!r} is not an action of a schedule; write for example 0F3, 1RECV_F3 or 0REDUCE_GRAD")
    chunk, kind, number, other, zero = found.groups()
    return RankAction(int(chunk), kind, int(number)) if kind else RankAction(int(other), zero, -1)
