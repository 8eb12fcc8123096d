"""Two chunks a stage, the second on the way back: chunk c is on stage c, then on stage 2p - 1 - c. The last stage hands over to
itself, and stage 0 has the first chunk and the last one. What ZB-V and DualPipeV share.
"""

from __future__ import annotations

from collections import Counter, deque

from autopar.ir.schedule import BACKWARD, INPUT, WEIGHT, Action


class VShapedStage:
    """The actions of a stage: per chunk (0 or 1, on the way there or back) the next micro-batch of each kind."""

    def __init__(self, stages: int, rank: int) -> None:
        self.chunks = rank, 2 * stages - 1 - rank
        self.actions: list[Action] = []
        self.counts: Counter[tuple[int, str]] = Counter()
        self.deferred: deque[tuple[int, int]] = deque()

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
                self.deferred.append((way, number))

    def add_weight_gradients(self) -> None:
        """Of the oldest input-gradient action whose weight gradients are deferred, if there is one."""
        if self.deferred:
            way, number = self.deferred.popleft()
            self.actions.append(Action(self.chunks[way], WEIGHT, number))
            self.counts[way, WEIGHT] += 1


def v_bubble(virtual: int, micro_batches: int) -> float:
    """Both ends of the V are on stage 0: almost no stage waits."""
    return 1 / 6
