"""Nobody waits forever: collectives of one stage, and the messages and actions of a pipeline.

On one stage all ranks run one text without branches on coordinates, with equal local shapes: so each group of each axis sees the
same collectives in the same order, forward and (autograd's order, of one graph) backward. `messages` proves the same of a
pipeline's schedule, a line of actions for each stage, which holds for all ranks of the stage's mesh at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.checker.shards import NotProven

_WORD = re.compile(r"(\d+)(?:(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|(UNSHARD|RESHARD|REDUCE_GRAD))")
COMPUTE = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class Step:
    """An action: chunk, kind, micro-batch (-1 where it has none)."""

    chunk: int
    kind: str
    part: int = -1

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.part if self.part >= 0 else ''}"


def read_schedule(lines: Sequence[str], line: int) -> list[list[Step]]:
    out = []
    for text in lines:
        steps = []
        for word in text.split():
            found = _WORD.fullmatch(word)
            if found is None:
                raise NotProven(line, f"{word[:40]!r} is no action of a schedule")
            steps.append(Step(int(found[1]), found[2] or found[4], int(found[3]) if found[3] else -1))
        out.append(steps)
    return out


@dataclass(frozen=True, slots=True)
class ScheduleProof:
    """A schedule of `chunks` model chunks and `parts` micro-batches."""

    stages: Sequence[Sequence[Step]]
    chunks: int
    parts: int
    line: int

    def check(self) -> dict[str, int]:
        """The numbers of the proof. NotProven at the first action that waits forever, runs twice, or reads what nobody made."""
        home = self._homes()
        self._complete(home)
        buffered = self._play(home, None)
        self._play(home, 0)
        messages = sum(step.kind.startswith("SEND") for steps in self.stages for step in steps)
        return {"actions": sum(map(len, self.stages)), "messages": messages, "most_messages_in_flight": buffered}

    def _refuse(self, stage: int, step: Step | str, reason: str) -> NotProven:
        return NotProven(self.line, f"stage {stage}, action {step}: {reason}")

    def _homes(self) -> dict[int, int]:
        home: dict[int, int] = {}
        for stage, steps in enumerate(self.stages):
            for step in steps:
                if home.setdefault(step.chunk, stage) != stage:
                    raise self._refuse(stage, step, f"chunk {step.chunk} is on stage {home[step.chunk]} too")
        if sorted(home) != list(range(self.chunks)):
            raise NotProven(self.line, f"the schedule runs chunks {sorted(home)}, the program has {self.chunks}")
        return home

    def _complete(self, home: Mapping[int, int]) -> None:
        """Every chunk runs each micro-batch forward and backward once, and sends and receives over each boundary once."""
        for stage, steps in enumerate(self.stages):
            if len(set(steps)) != len(steps):
                twice = next(step for index, step in enumerate(steps) if step in steps[:index])
                raise self._refuse(stage, twice, "it stands there twice")
            own_chunks = [chunk for chunk in home if home[chunk] == stage]
            wanted = {Step(c, kind, part) for c in own_chunks for part in range(self.parts) for kind in self._kinds(c, home)}
            own = {step for step in steps if step.part >= 0}
            split = {Step(step.chunk, "B", step.part) for step in own if step.kind == "I"}
            done = {step for step in own if step.kind not in ("I", "W")} | split
            weights = {Step(s.chunk, "I", s.part) for s in own if s.kind == "W"} ^ {s for s in own if s.kind == "I"}
            if weights or (split & own):
                odd_half = min(map(str, weights or split & own))
                raise self._refuse(stage, odd_half, "one half of a backward has no other half, or runs twice")
            if done != wanted:
                odd = min(done ^ wanted, key=str)
                raise self._refuse(stage, odd, "it is missing" if odd in wanted else "nobody expects it")

    def _kinds(self, chunk: int, home: Mapping[int, int]) -> Iterator[str]:
        yield from ("F", "B")
        if chunk and home[chunk - 1] != home[chunk]:
            yield "RECV_F"
            yield "SEND_B"
        if chunk + 1 < self.chunks and home[chunk + 1] != home[chunk]:
            yield "SEND_F"
            yield "RECV_B"

    def _play(self, home: Mapping[int, int], buffers: int | None) -> int:
        """Runs all stages at once, each its actions in order. With ``buffers`` 0 a send ends only after its receive was posted;
        else receives wait for sends where they are used. Messages of two stages match in the order in which both have them."""
        at = [0] * len(self.stages)
        made: set[Step] = set()
        posted: set[tuple[str, int, int]] = set()
        sent: set[tuple[str, int, int]] = set()
        order: dict[tuple[int, int], tuple[deque[str], deque[str]]] = {}
        flying, most, moved = 0, 0, True
        while moved:
            moved = False
            for stage, steps in enumerate(self.stages):
                while at[stage] < len(steps):
                    step = steps[at[stage]]
                    reason = self._waits(step, home, made, posted, sent, buffers)
                    if reason:
                        break
                    if step.kind.startswith(("SEND", "RECV")):
                        self._match(stage, step, home, order)
                        (sent if step.kind.startswith("SEND") else posted).add(self._message(step))
                        flying += 1 if step.kind.startswith("SEND") else 0
                        most = max(most, flying)
                    elif step.kind in COMPUTE:
                        made.add(step)
                        flying -= sum(self._message(each) in sent for each in self._received(step, home))
                    at[stage] += 1
                    moved = True
        for stage, steps in enumerate(self.stages):
            if at[stage] < len(steps):
                step = steps[at[stage]]
                raise self._refuse(stage, step, f"it waits forever: {self._waits(step, home, made, posted, sent, buffers)}")
        return most

    @staticmethod
    def _message(step: Step) -> tuple[str, int, int]:
        """Direction, boundary, micro-batch: of a send and its receive the same."""
        forward = step.kind.endswith("F")
        sends = step.kind.startswith("SEND")
        return step.kind[-1], step.chunk if forward == sends else step.chunk - 1, step.part

    def _received(self, step: Step, home: Mapping[int, int]) -> list[Step]:
        kinds = {"F": ["RECV_F"], "B": ["RECV_B"], "I": ["RECV_B"]}.get(step.kind, [])
        return [Step(step.chunk, kind, step.part) for kind in kinds if kind in set(self._kinds(step.chunk, home))]

    def _waits(
        self, step: Step, home: Mapping[int, int], made: set[Step], posted: set[tuple[str, int, int]],
        sent: set[tuple[str, int, int]], buffers: int | None,
    ) -> str:  # fmt: skip
        """Why an action cannot run yet; empty where it can."""
        chunk, part = step.chunk, step.part
        if step.kind.startswith("SEND"):
            source = [Step(chunk, "F", part)] if step.kind == "SEND_F" else [Step(chunk, kind, part) for kind in "BI"]
            if not any(each in made for each in source):
                return "nothing has made what it sends"
            return "nobody has posted its receive" if buffers == 0 and self._message(step) not in posted else ""
        if step.kind in ("F", "B", "I"):
            for each in self._received(step, home):
                if self._message(each) not in posted:
                    return f"{each} was not posted before"
                if self._message(each) not in sent:
                    return f"{each} has not come"
        if step.kind == "F" and chunk and home[chunk - 1] == home[chunk] and Step(chunk - 1, "F", part) not in made:
            return "the chunk before has not run"
        if step.kind in ("B", "I"):
            if Step(chunk, "F", part) not in made:
                return "its forward has not run"
            after = [Step(chunk + 1, kind, part) for kind in "BI"]
            if chunk + 1 < self.chunks and home[chunk + 1] == home[chunk] and not any(each in made for each in after):
                return "the backward of the chunk after has not run"
        if step.kind == "W" and Step(chunk, "I", part) not in made:
            return "its first half has not run"
        return ""

    def _match(
        self, stage: int, step: Step, home: Mapping[int, int], order: dict[tuple[int, int], tuple[deque[str], deque[str]]]
    ) -> None:
        """Sends from one stage to another come in the order in which their receives are posted."""
        sends = step.kind.startswith("SEND")
        other = home[step.chunk + (1 if step.kind in ("SEND_F", "RECV_B") else -1)]
        queues = order.setdefault((stage, other) if sends else (other, stage), (deque(), deque()))
        own, theirs = queues if sends else queues[::-1]
        message = str(self._message(step))
        if theirs:
            if theirs[0] != message:
                raise self._refuse(stage, step, f"the other side has {theirs[0]} at this place of the order")
            theirs.popleft()
        else:
            own.append(message)


def unrolled(stages: Sequence[Sequence[Step]], parts: int, windows: int) -> list[list[Step]]:
    """Windows of a schedule that is never drained, one after the other, the first filled and the last one drained. In a window an
    action that stands before the forward of its micro-batch is of the window before; so each action waits for those of its own
    window and of the ones beside it alone, and what holds of all pairs of neighbours holds of any number of windows."""
    out = []
    for steps in stages:
        forward = {(step.chunk, step.part): index for index, step in enumerate(steps) if step.kind == "F"}
        line: list[Step] = []
        for window in range(windows + 1):
            for index, step in enumerate(steps):
                own = step.kind.endswith("F") or index > forward.get((step.chunk, step.part), -1)
                number = step.part + parts * (window if own else window - 1)
                if step.part >= 0 and 0 <= number < parts * windows:
                    line.append(Step(step.chunk, step.kind, number))
        out.append(line)
    return out


def state_actions(stages: Sequence[Sequence[Step]], line: int) -> None:
    """Gradients are reduced after the last backward of a chunk; weights that were gathered are there for all its actions."""
    for stage, steps in enumerate(stages):
        last = {step.chunk: index for index, step in enumerate(steps) if step.kind in ("B", "I", "W")}
        first = {step.chunk: index for index, step in reversed(list(enumerate(steps))) if step.kind in COMPUTE}
        seen: dict[tuple[int, str], int] = {}
        for index, step in enumerate(steps):
            if step.part >= 0:
                continue
            if (step.chunk, step.kind) in seen:
                raise NotProven(line, f"stage {stage}: {step} stands there twice")
            seen[step.chunk, step.kind] = index
            late = step.kind == "UNSHARD" and index > first.get(step.chunk, index)
            early = step.kind in ("RESHARD", "REDUCE_GRAD") and index < last.get(step.chunk, -1)
            if late or early:
                raise NotProven(line, f"stage {stage}: {step} comes too {'late' if late else 'early'}")
        for chunk in last:
            if (chunk, "UNSHARD") in seen and (chunk, "RESHARD") not in seen:
                raise NotProven(line, f"stage {stage}: the weights of chunk {chunk} are never freed")
