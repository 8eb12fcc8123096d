"""Paths through the actions of a schedule, whatever its chunks take: each is a chain of actions that wait for each other, so a
step is not shorter than their sum; and how many micro-batches a stage holds at one place in its order.

Three kinds go through all chunks, and stay on the stage of one of them: with the first micro-batch forward to a chunk, there from
its first to its last forward, or from its first to its last backward, or all of it, and on with the last micro-batch. Their means
over the chunks of a phase (one chunk of every stage) are taken, which chunks of other sizes hardly shorten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy

from autopar.cost_models.step.pipeline_clock import repeats_from
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.schedules.pipeline_schedule import chunks_of_stages, schedule_of, stage_of_chunks

KINDS = 5
"""Durations of a chunk: forward, gradients of inputs, gradients of weights; the first forward, and the weights' part of the last
backward."""

_FORWARD, _INPUTS, _WEIGHTS, _FIRST, _LAST, _SENDS = range(KINDS + 1)
"""After the durations a row of the transfers between each chunk and the next, in either direction."""

_MOST_PHASES = 3
"""Phases that are classes of their own: of more chunks a stage, those in the middle are one class, but for few chunks in all."""

_FEW_CHUNKS = 32

COARSE_GROUPS, FINE_GROUPS = 3, 8
"""Groups that the stages of a long pipeline are looked at in. Rows of a group are added up, which loses little where neighbours
are alike: three groups say enough of schedules with a long bubble, in a tenth of the time."""

_MOST_PLACES = 3

_MOST_ACTIONS = 10_000
"""Actions of a schedule with paths: longer ones count by what each stage does alone, and the micro-batches in flight of shorter
ones."""


@dataclass(frozen=True, slots=True)
class SchedulePath:
    """One path as ``[kind, chunk]``: how often each duration of each chunk occurs, at least; the mean of several where those end
    on the stages of a group, `end`. `sends`: how often something is sent between each chunk and the next."""

    counts: Any
    end: int
    sends: Any


@dataclass(frozen=True, slots=True)
class SchedulePaths:
    """The paths of one schedule. `groups`: the stages of each, neighbours. `classes`: the chunks of each, all in one group.
    `in_flight`: per group, what each of its stages holds of each chunk of some classes at one place of its order, at least."""

    classes: tuple[tuple[int, ...], ...]
    groups: tuple[range, ...]
    stage_of: tuple[int, ...]
    group_of_class: tuple[int, ...]
    in_flight: tuple[tuple[dict[int, int], ...], ...]
    paths: tuple[SchedulePath, ...]


@lru_cache(maxsize=1024)
def schedule_paths(stages: int, virtual: int, name: str, micro_batches: int, most_groups: int) -> SchedulePaths:
    """Return the paths of a named schedule, its stages in at most so many groups."""
    every = _schedule_actions(stages, virtual, name, micro_batches)
    groups, phases = stage_groups(stages, most_groups), _phases(stages, virtual, most_groups == COARSE_GROUPS)
    classes = tuple(tuple(phase * stages + place for phase in each for place in group) for each in phases for group in groups)
    group_of = {stage: number for number, group in enumerate(groups) for stage in group}
    phase_of = {phase: number for number, each in enumerate(phases) for phase in each}
    class_of = {chunk: number for number, members in enumerate(classes) for chunk in members}
    held = [[_least_of_classes(each, class_of) for each in of_stage] for of_stage in every.held]
    return SchedulePaths(
        classes=classes,
        groups=groups,
        stage_of=every.stage_of,
        group_of_class=tuple(group_of[every.stage_of[members[0]]] for members in classes),
        in_flight=tuple(_held_in_group([held[stage] for stage in group]) for group in groups),
        paths=tuple(_mean_paths(every.paths, group_of, phase_of)),
    )


@dataclass(frozen=True, slots=True)
class _Path:
    """One path as ``[kind, chunk]``, with what is sent, and the stage where it ends. `along`: it stays on that stage (empty), or
    on a chunk of a `phase`, with its forwards, its backwards or all that it does."""

    counts: Any
    end: int
    along: str = ""
    phase: int = 0


@dataclass(frozen=True, slots=True)
class _ScheduleActions:
    """The paths of one schedule, and per stage what it `held` by chunk where it held most."""

    stage_of: tuple[int, ...]
    held: tuple[tuple[dict[int, int], ...], ...]
    paths: tuple[_Path, ...]


@lru_cache(maxsize=256)
def _schedule_actions(stages: int, virtual: int, name: str, micro_batches: int) -> _ScheduleActions:
    pipeline = Pipeline(stages, virtual, name)
    long = 2 * stages * virtual * micro_batches > _MOST_ACTIONS
    schedule = schedule_of(pipeline, repeats_from(pipeline, micro_batches) if long else micro_batches)
    stage_of = tuple(stage_of_chunks(pipeline))
    held = (_most_held(actions, here) for actions, here in zip(schedule.ranks, chunks_of_stages(pipeline), strict=True))
    paths = _busy(schedule, stage_of, micro_batches) if long else _Paths(schedule, stage_of, micro_batches).all(stages, virtual)
    return _ScheduleActions(stage_of, tuple(map(tuple, held)), tuple(paths))


def stage_groups(stages: int, most: int) -> tuple[range, ...]:
    """Return neighbouring stages in at most so many groups. The first and the last are alone, which embed and compute the loss;
    the groups are the same from both ends, as V-shaped schedules deal chunks."""
    if stages <= max(most, 2):
        return tuple(range(stage, stage + 1) for stage in range(stages))
    inner = max(1, most - 2)
    edges = [1 + round(number * (stages - 2) / inner) for number in range(inner + 1)]
    edges = [edge if 2 * edge <= stages else stages - edges[inner - number] for number, edge in enumerate(edges)]
    return (range(1), *(range(a, b) for a, b in pairwise(sorted({*edges}))), range(stages - 1, stages))


def _held_in_group(of_stages: Sequence[Sequence[dict[int, int]]]) -> tuple[dict[int, int], ...]:
    """Return, for each of the places where stages hold most, the least of the group's stages by class."""
    out = []
    for place in range(max(map(len, of_stages))):
        least: dict[int, int] = {}
        for held in of_stages:
            for number, count in held[min(place, len(held) - 1)].items():
                least[number] = min(count, least.get(number, count))
        out.append(least)
    return tuple(out)


def _mean_paths(paths: Iterable[_Path], group_of: Mapping[int, int], phase_of: Mapping[int, int]) -> Iterator[SchedulePath]:
    """Yield the means of paths that end in one group and stay alike in one class of phases: the longest is not below its mean."""
    alike: dict[tuple[int, str, int], list[Any]] = {}
    for path in paths:
        alike.setdefault((group_of[path.end], path.along, phase_of[path.phase]), []).append(path.counts)
    for (group, _, _), counts in alike.items():
        mean = sum(counts) / len(counts)
        yield SchedulePath(mean[:KINDS], group, mean[_SENDS, :-1])


def _phases(stages: int, virtual: int, coarse: bool) -> list[range]:
    """All of them one by one, or the middle ones together. A phase is a chunk of every stage."""
    if virtual <= _MOST_PHASES or (stages * virtual <= _FEW_CHUNKS and not coarse):
        return [range(phase, phase + 1) for phase in range(virtual)]
    return [range(1), range(1, virtual - 1), range(virtual - 1, virtual)]


def _least_of_classes(held: dict[int, int], class_of: dict[int, int]) -> dict[int, int]:
    out: dict[int, int] = {}
    for chunk, count in held.items():
        out[class_of[chunk]] = min(count, out.get(class_of[chunk], count))
    return out


def _most_held(actions: Sequence[Action], chunks: Sequence[int]) -> list[dict[int, int]]:
    """Return what a stage holds where it holds most: in all, of the chunk that it holds least of, and of the last chunk."""
    now = dict.fromkeys(chunks, 0)
    every: dict[tuple[int, ...], None] = {}
    for action in actions:
        now[action.chunk] += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(action.kind, 0)
        if action.kind == FORWARD:
            every[tuple(now.values())] = None
    ranked = [max(every, key=lambda held: (sum(held), min(held))), max(every, key=lambda held: (min(held), sum(held)))]
    ranked.append(max(every, key=lambda held: (held[-1], sum(held))))
    return [dict(zip(now, held, strict=True)) for held in dict.fromkeys(ranked)][:_MOST_PLACES]


def _busy(schedule: Schedule, stage_of: Sequence[int], micro_batches: int) -> Iterator[_Path]:
    """Yield what each stage computes, after the first forwards before it."""
    for stage, actions in enumerate(schedule.ranks):
        counts = numpy.zeros((KINDS + 1, len(stage_of)))
        chunks_here = [chunk for chunk, of in enumerate(stage_of) if of == stage]
        counts[:KINDS, chunks_here] = numpy.array([micro_batches - 1, micro_batches, micro_batches - 1, 1, 1])[:, None]
        counts[[_FIRST, _SENDS], : actions[0].chunk] += 1
        yield _Path(counts, stage)


class _Paths:
    """All of one schedule, as ``[kind, chunk]`` counts. What is sent between a chunk and the next counts with the first of them:
    a path that stays on a stage has one transfer less than it may have."""

    def __init__(self, schedule: Schedule, stage_of: Sequence[int], micro_batches: int) -> None:
        self.schedule, self.stage_of, self.last = schedule, stage_of, micro_batches - 1
        chunks = len(stage_of)
        self.slots: list[list[tuple[int, ...]]] = [_slots(actions) for actions in schedule.ranks]
        self.place = [{each: cell for cell, each in enumerate(actions)} for actions in schedule.ranks]
        self.sums = [self._sums(rank) for rank in range(len(schedule.ranks))]
        self.forwards, self.backwards = ([numpy.zeros((KINDS + 1, chunks)) for _ in range(2)] for _ in range(2))
        for chunk, rank in enumerate(stage_of):
            for number, micro in enumerate((0, self.last)):
                for table, cell in (
                    (self.forwards, self._forward(chunk, micro)),
                    (self.backwards, self._backward(chunk, micro)),
                ):
                    for slot in self.slots[rank][cell]:
                        table[number][slot, chunk] += 1
                    table[number][_SENDS, chunk] += chunk + 1 < chunks

    def _forward(self, chunk: int, micro: int) -> int:
        return self.place[self.stage_of[chunk]][Action(chunk, FORWARD, micro)]

    def _backward(self, chunk: int, micro: int) -> int:
        """Return the cell of the backward that the chunk before waits for."""
        cells = self.place[self.stage_of[chunk]]
        whole = cells.get(Action(chunk, BACKWARD, micro))
        return cells[Action(chunk, INPUT, micro)] if whole is None else whole

    def all(self, stages: int, virtual: int) -> Iterator[_Path]:
        """Yield those that stay on a stage, and the mean over the chunks of each phase of those that stay on a chunk."""
        for stage, actions in enumerate(self.schedule.ranks):
            first = actions[0].chunk
            yield _Path(self._stay(stage, 0, len(actions) - 1) + self._part(self.forwards[0], 0, first), stage)
        rest, end = self._rest(), self.stage_of[0]
        for phase in range(virtual):
            chunks = range(phase * stages, (phase + 1) * stages)
            for ways in ((FORWARD, FORWARD), (BACKWARD, BACKWARD), (FORWARD, BACKWARD)):
                counts = [each for chunk in chunks if (each := self._on(chunk, *ways)) is not None]
                if counts:
                    yield _Path(sum(counts) / len(counts) + rest, end, "".join(ways), phase)

    def _stay(self, rank: int, first: int, last: int) -> Any:
        """All actions of a rank from one cell to another."""
        return (
            self.sums[rank][last + 1] - self.sums[rank][first] if last >= first else numpy.zeros((KINDS + 1, len(self.stage_of)))
        )

    def _sums(self, rank: int) -> Any:
        """Return ``[cell, kind, chunk]``: what comes before a cell."""
        actions = self.schedule.ranks[rank]
        out = numpy.zeros((len(actions) + 1, KINDS + 1, len(self.stage_of)), dtype=numpy.int32)
        for cell, action in enumerate(actions):
            for slot in self.slots[rank][cell]:
                out[cell + 1, slot, action.chunk] = 1
        return out.cumsum(axis=0, dtype=numpy.int32)

    @staticmethod
    def _part(counts: Any, first: int, end: int) -> Any:
        out = numpy.zeros_like(counts)
        out[:, first:end] = counts[:, first:end]
        return out

    def _rest(self) -> Any:
        """Return what the first chunk's stage computes after its last backward (or gradient of inputs)."""
        rank = self.stage_of[0]
        return self._stay(rank, self._backward(0, self.last) + 1, len(self.schedule.ranks[rank]) - 1)

    def _on(self, chunk: int, begin: str, end: str) -> Any | None:
        """The path that stays on a chunk from its first forward or backward (`begin`) to its last one (`end`); None where these
        come in the other order."""
        forth, back = begin == FORWARD, end == BACKWARD
        first = self._forward(chunk, 0) if forth else self._backward(chunk, 0)
        last = self._backward(chunk, self.last) if back else self._forward(chunk, self.last)
        if first > last:
            return None
        many = len(self.stage_of)
        there = self._part(self.forwards[0], 0, chunk if forth else many) + self._stay(self.stage_of[chunk], first, last)
        if not forth:
            there = there + self._part(self.backwards[0], chunk + 1, many)
        if not back:
            there = there + self._part(self.forwards[1], chunk + 1, many)
        return there + self._part(self.backwards[1], 0, chunk if back else many)


def _slots(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """The durations of each action of a rank, as `schedules.clock` has them."""
    last = {each.chunk: cell for cell, each in enumerate(actions) if each.kind in (BACKWARD, WEIGHT)}
    out: list[tuple[int, ...]] = []
    begun = set[int]()
    for cell, each in enumerate(actions):
        weights = _LAST if last.get(each.chunk) == cell else _WEIGHTS
        if each.kind == FORWARD:
            out.append((_FORWARD if each.chunk in begun else _FIRST,))
            begun.add(each.chunk)
        else:
            out.append({BACKWARD: (_INPUTS, weights), INPUT: (_INPUTS,), WEIGHT: (weights,)}[each.kind])
    return out
