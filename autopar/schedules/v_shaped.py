"""Two chunks a rank, the second on the way back: chunk c is on rank c, then on rank 2p - 1 - c. The last rank hands over to
itself, and rank 0 has the first chunk and the last one.

ZB-V: Qi et al., arXiv 2401.10241, section 6. DualPipeV: DeepSeek-AI, arXiv 2412.19437 and github.com/deepseek-ai/DualPipe, where
a forward and a backward that are beside each other run at once; here one after the other. Both in the order of torch's.
"""

from __future__ import annotations

from collections import Counter, deque

from autopar.errors import PlanError
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action


class _Rank:
    """Actions of a rank: per chunk (0 or 1, on the way there or back) the next micro-batch of each kind."""

    def __init__(self, stages: int, rank: int) -> None:
        self.chunks = rank, 2 * stages - 1 - rank
        self.actions: list[Action] = []
        self.counts: Counter[tuple[int, str]] = Counter()
        self.late: deque[tuple[int, int]] = deque()

    def count(self, way: int, kind: str) -> int:
        return self.counts[way, kind]

    def add(self, *steps: str) -> None:
        """``"F0"``: the next forward on the way there. I and W count as one half of B each."""
        for step in steps:
            kind, way = step[0], int(step[1])
            number = self.counts[way, INPUT if kind == BACKWARD else kind]
            self.actions.append(Action(self.chunks[way], kind, number))
            for counted in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
                self.counts[way, counted] += 1
            if kind == INPUT:
                self.late.append((way, number))

    def weights(self) -> None:
        """The oldest part of a backward that waits, if any does."""
        if self.late:
            way, number = self.late.popleft()
            self.actions.append(Action(self.chunks[way], WEIGHT, number))
            self.counts[way, WEIGHT] += 1


def zero_bubble_v(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """`ScheduleZBVZeroBubble` of torch. Fewer than ``2 p - 1`` micro-batches are those of so many, without the others."""
    _two_chunks("zbv", virtual)
    many = max(2 * stages - 1, micro_batches)
    out = _Rank(stages, rank)
    out.add(*["F0"] * (2 * (stages - rank) - 1), *["F1", "F0"] * rank, *["F1", "I1", "W1"] * (stages - rank))
    while out.count(1, FORWARD) < out.count(0, FORWARD) or out.count(0, FORWARD) < many:
        out.add(*["F0"] * (out.count(0, FORWARD) < many), "I0", "W0", "F1", "I1", "W1")
    out.add(*["I0", "I1"] * rank, *["I0", "W0"] * (stages - rank))
    for way in (1, 0):
        out.add(*[f"W{way}"] * (out.count(way, INPUT) - out.count(way, WEIGHT)))
    return tuple(each for each in out.actions if each.micro_batch < micro_batches)


def dual_pipe_v(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """`ScheduleDualPipeV` of torch, without overlapping; at least ``2 p`` micro-batches."""
    _two_chunks("dualpipev", virtual)
    if micro_batches < 2 * stages:
        raise PlanError(f"dualpipev on {stages} stages takes {2 * stages} micro-batches or more, not {micro_batches}")
    out, behind = _Rank(stages, rank), stages - rank - 1
    out.add(*["F0"] * (2 * behind), *["F0", "F1"] * (rank + 1))
    for _ in range(behind):
        out.add("I1")
        out.weights()
        out.add("F1")
    out.add(*["F0", "B1", "F1", "B0"] * (micro_batches - 2 * stages + rank + 1), *["B1", "F1", "B0"] * behind)
    for place in range(2 * (rank + 1)):  # the second half of them in two parts
        out.add(f"{INPUT if place > rank else BACKWARD}{1 - place % 2}")
    for _ in range(behind):
        out.weights()
        out.add("I0")
    for _ in range(rank + 1):
        out.weights()
    return tuple(out.actions)


def _two_chunks(name: str, virtual: int) -> None:
    if virtual != 2:
        raise PlanError(f"the schedule {name} has two chunks a stage, not {virtual}: say virtual=2")
