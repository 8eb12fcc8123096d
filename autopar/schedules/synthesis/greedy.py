"""A greedy list scheduler: a simulation in which each stage runs the ready action of the highest priority, and a search of its
rules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TypeVar

from autopar.schedules.synthesis.task import BACKWARDS, FORWARDS, WEIGHTS, Order, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one rank. `ahead`: so many (chunk, micro-batch) pairs it takes before it prefers backwards; `most`, per chunk:
    never more. It waits for what is known to arrive within `patience` of the action's own time rather than begin a forward, or
    weights. `deep`: of forwards, those of later chunks first; `early`: of backwards, those of earlier chunks first."""

    ahead: tuple[int, ...]
    most: tuple[int, ...]
    patience: tuple[tuple[float, float], ...]
    deep: tuple[bool, ...]
    early: tuple[bool, ...]


_POOL = 5
"""Rules that are changed beside each other."""


@dataclass(slots=True)
class _Chunk:
    """A model chunk. `done` counts its ended or running actions by kind; `arrivals` are when the inputs of its forwards and of
    its backwards are there, one for each micro-batch so far."""

    number: int
    saved_bytes: float
    deferred_bytes: float
    most: int
    done: list[int] = field(default_factory=lambda: [0, 0, 0])
    arrivals: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


@dataclass(slots=True)
class _Stage:
    """A pipeline stage with its rules. It runs one action at a time, and is free again at `free_at`."""

    chunks: list[_Chunk]
    limit_bytes: float
    ahead: int
    patience: tuple[float, float]
    deep: bool
    early: bool
    free_at: float = 0.0
    used_bytes: float = 0.0
    in_flight: int = 0
    actions: list[tuple[int, int, int]] = field(default_factory=list)

    def fits(self, chunk: _Chunk, last_kind: int) -> bool:
        """Return whether a chunk's next forward fits, with enough left for all chunks of the oldest micro-batch under way."""
        begun, oldest = chunk.done[FORWARDS], self.chunks[-1].done[FORWARDS]
        if begun == oldest:
            return self.used_bytes + chunk.saved_bytes <= self.limit_bytes
        if begun - chunk.done[last_kind] >= chunk.most:
            return False
        reserve = sum(each.saved_bytes for each in self.chunks if each.done[FORWARDS] <= oldest)
        return self.used_bytes + chunk.saved_bytes + reserve <= self.limit_bytes


_Choice = tuple[_Chunk, int]
"""The next action of a stage: a chunk, and the kind."""


class _Simulation:
    """A simulation of the ranks under their rules. Events are (seconds, stage): a stage that may be free, or have an input."""

    def __init__(self, task: Task, rules: Rules) -> None:
        self.task, self.split, self.last_kind = task, task.split, task.last_kind
        self.chunks = [
            _Chunk(number, *sizes) for number, sizes in enumerate(zip(task.saved, task.deferred, rules.most, strict=True))
        ]
        self.chunks[0].arrivals[FORWARDS].extend([0.0] * task.micro_batches)
        self.stages = [
            _Stage(
                chunks=[self.chunks[number] for number in task.chunks_of(rank)],
                limit_bytes=task.limit[rank] * (1 + 1e-9),
                ahead=rules.ahead[rank],
                patience=rules.patience[rank],
                deep=rules.deep[rank],
                early=rules.early[rank],
            )
            for rank in range(task.ranks)
        ]
        self.events = [(0.0, rank) for rank in range(task.ranks)]

    def run(self) -> tuple[float, Order]:
        """Return (makespan, order)."""
        while self.events:
            now, rank = heappop(self.events)
            stage = self.stages[rank]
            if stage.free_at <= now:
                choice = self._choose(stage, now)
                if choice is not None:
                    self._execute(rank, *choice, now)
        each_chunk = self.task.micro_batches * len(self.task.kinds)
        if any(len(stage.actions) < each_chunk * len(stage.chunks) for stage in self.stages):
            return inf, ()
        return max(stage.free_at for stage in self.stages), tuple(tuple(stage.actions) for stage in self.stages)

    def _choose(self, stage: _Stage, now: float) -> _Choice | None:
        """Choose the action with the highest priority of those whose input is there, weight gradients where there is none; None
        where the stage waits."""
        choice, next_arrival = self._ready(stage, now)
        if choice is None:
            choice = self._weight_gradients(stage)
            if choice is None:
                return None
        chunk, kind = choice
        if kind != BACKWARDS and next_arrival < inf:
            seconds = self.task.duration(chunk.number, kind, chunk.done[kind])
            if next_arrival - now < seconds * stage.patience[kind == WEIGHTS]:
                return None  # what arrives wakes the stage
        return choice

    def _ready(self, stage: _Stage, now: float) -> tuple[_Choice | None, float]:
        """Return the forward or backward to run now, and when the next input arrives that is not there yet.

        Priority is (level, place of the chunk): forwards while fewer than `ahead` pairs are in flight, then backwards, then
        forwards; among each the chunks in the order of `deep` and `early`.
        """
        best: _Choice | None = None
        highest, next_arrival = (-1, 0), inf
        forward_level = 2 if stage.in_flight < stage.ahead else 0
        for chunk in stage.chunks:
            number, arrivals = chunk.done[BACKWARDS], chunk.arrivals[BACKWARDS]
            if number < len(arrivals):
                if arrivals[number] > now:
                    next_arrival = min(next_arrival, arrivals[number])
                elif (priority := (1, -chunk.number if stage.early else chunk.number)) > highest:
                    best, highest = (chunk, BACKWARDS), priority
            number, arrivals = chunk.done[FORWARDS], chunk.arrivals[FORWARDS]
            if number < len(arrivals) and stage.fits(chunk, self.last_kind):
                if arrivals[number] > now:
                    next_arrival = min(next_arrival, arrivals[number])
                elif (priority := (forward_level, chunk.number if stage.deep else -chunk.number)) > highest:
                    best, highest = (chunk, FORWARDS), priority
        return best, next_arrival

    def _weight_gradients(self, stage: _Stage) -> _Choice | None:
        """Return the weight gradients of the chunk that is furthest behind with them."""
        if not self.split:
            return None
        behind = [chunk for chunk in stage.chunks if chunk.done[WEIGHTS] < chunk.done[BACKWARDS]]
        return (min(behind, key=lambda chunk: chunk.done[WEIGHTS]), WEIGHTS) if behind else None

    def _execute(self, rank: int, chunk: _Chunk, kind: int, now: float) -> None:
        """Run the action from now on: note what the stage holds, and what other stages may begin when it ends."""
        stage, micro_batch = self.stages[rank], chunk.done[kind]
        end = now + self.task.duration(chunk.number, kind, micro_batch)
        chunk.done[kind] += 1
        stage.actions.append((chunk.number, kind, micro_batch))
        stage.free_at = end
        heappush(self.events, (end, rank))
        if kind == FORWARDS:
            stage.used_bytes += chunk.saved_bytes
            stage.in_flight += 1
            self._send_forward(chunk, end)
        elif kind == BACKWARDS:
            stage.used_bytes += (chunk.deferred_bytes if self.split else 0.0) - chunk.saved_bytes
            if chunk.number:
                self._arrive(chunk.number - 1, BACKWARDS, end + self.task.lags[chunk.number - 1])
        else:
            stage.used_bytes -= chunk.deferred_bytes
        if kind == self.last_kind:
            stage.in_flight -= 1

    def _send_forward(self, chunk: _Chunk, end: float) -> None:
        """Send a forward's result to the next chunk; the last chunk begins its own backward."""
        if chunk.number + 1 < len(self.chunks):
            self._arrive(chunk.number + 1, FORWARDS, end + self.task.lags[chunk.number])
        else:
            self._arrive(chunk.number, BACKWARDS, end)

    def _arrive(self, chunk: int, kind: int, at: float) -> None:
        self.chunks[chunk].arrivals[kind].append(at)
        heappush(self.events, (at, self.task.rank_of[chunk]))


def simulate_rules(task: Task, rules: Rules) -> tuple[float, Order]:
    """Return (makespan, order), infinite where the rules do not come to an end. They do: a stage keeps memory for all chunks of
    the micro-batch that is next at its last chunk."""
    return _Simulation(task, rules).run()


def initial_rules(task: Task) -> list[Rules]:
    """Return the rules to begin with: backwards first, or as far ahead as memory allows, and in between; chunks share the memory
    in several ways."""
    ranks, yes = task.ranks, (True,) * task.ranks
    out = []
    for ahead in (0, 1, 2, 3):
        for most in _shares(task):
            for patient in ((0.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0)):
                for deep in (True, False):
                    aheads = tuple(round(ahead / 2 * (ranks - rank)) for rank in range(ranks))
                    out.append(Rules(aheads, most, (patient,) * ranks, (deep,) * ranks, yes))
    return out


def _shares(task: Task) -> list[tuple[int, ...]]:
    """Return how many micro-batches each chunk may hold: all; or what the memory limit allows, shared as if a micro-batch stayed
    in a chunk for the way from there to the last chunk and back, and in the last one for some part of that."""
    many, last = task.micro_batches, len(task.rank_of) - 1
    out = [(many,) * (last + 1)]
    for rest in (0.1, 0.3, 1.0):
        most = []
        for chunk, rank in enumerate(task.rank_of):
            chunks = task.chunks_of(rank)
            total = sum(task.saved[each] * (last - each + rest * last) for each in chunks)
            share = (last - chunk + rest * last) / total if total else inf
            most.append(max(1, min(many, round(task.limit[rank] * share)) if share < inf else many))
        out.append(tuple(most))
    return out


def search_rules(task: Task, best: float, order: Order, bound: float, rounds: int) -> tuple[float, Order]:
    """Change rules one by one, at random, so many times, and return the best order."""
    random = Random(0)
    tried = [(*simulate_rules(task, rules), rules) for rules in initial_rules(task)]
    pool = [(seconds, rules) for seconds, _, rules in sorted(tried, key=lambda each: each[0])[:_POOL]]
    makespan, best_order, _ = min(tried, key=lambda each: each[0])
    if makespan < best:
        best, order = makespan, best_order
    for _ in range(rounds):
        if best <= bound * (1 + 1e-9):
            break
        place = min(random.randrange(len(pool)), random.randrange(len(pool)))
        seconds, rules = pool[place]
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            rules = _mutate(rules, random.randrange(task.ranks), random, task)
        makespan, best_order = simulate_rules(task, rules)
        if makespan <= seconds * (1 + random.choice((0.0, 0.0, 0.0, 0.002))):
            pool[place] = makespan, rules
            pool.sort(key=lambda each: each[0])
        if makespan < best * (1 - 1e-12):
            best, order = makespan, best_order
    return best, order


def _mutate(rules: Rules, rank: int, random: Random, task: Task) -> Rules:
    """Change one rule of one rank."""
    field = random.choice(("ahead", "ahead", "most", "patience", "patience", "deep", "early"))
    if field == "ahead":
        ahead = max(0, rules.ahead[rank] + random.choice((-3, -2, -1, 1, 2, 3)))
        return replace(rules, ahead=_put(rules.ahead, rank, ahead))
    if field == "most":
        chunk, many = random.choice(task.chunks_of(rank)), task.micro_batches
        few = max(1, min(many, rules.most[chunk] + random.choice((-2, -1, 1, 2))))
        return replace(rules, most=_put(rules.most, chunk, random.choice((many, few, few))))
    if field == "patience":
        patience = random.choice((0.0, 0.25, 0.5, 1.0)), random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
        return replace(rules, patience=_put(rules.patience, rank, patience))
    if field == "deep":
        return replace(rules, deep=_put(rules.deep, rank, not rules.deep[rank]))
    return replace(rules, early=_put(rules.early, rank, not rules.early[rank]))


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
