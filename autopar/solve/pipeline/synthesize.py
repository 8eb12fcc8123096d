"""Schedule synthesis: a CP-SAT model for the real times of the chunks and the memory limit of each stage, with the best known
schedule as its first solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from ortools.sat.python import cp_model

from autopar.errors import Infeasible, PlanError
from autopar.ir.schedule import Schedule
from autopar.schedules.check import check
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.synthesis.greedy import search_rules
from autopar.schedules.synthesis.known_orders import known_orders, start_seconds, with_merged_backwards
from autopar.schedules.synthesis.makespan_bound import makespan_lower_bound
from autopar.schedules.synthesis.task import BACKWARDS, FORWARDS, WEIGHTS, MemoryLimits, Order, Task
from autopar.solve.ilp.linear_model import Status

_UNITS = 1_000_000
"""Units of the best known makespan, or of a stage's memory, where numbers are no multiples of a larger unit."""

_OPTIMAL_GAP = 1e-3
"""The relative gap at which a schedule counts as optimal; seconds are rounded down to units."""

_ACTIONS_PER_EFFORT = 50_000
"""Actions that the greedy search over rules simulates for each unit of effort: about as long as CP-SAT takes for it."""


@dataclass(frozen=True, slots=True)
class Synthesis:
    """A synthesized schedule. `builder` is the best named schedule that fits in memory, with its makespan; `lower_bound_seconds`
    is below every schedule of these chunks on these ranks. `status`: OPTIMAL where the gap is below 0.1 %, else FEASIBLE."""

    schedule: Schedule
    makespan_seconds: float
    lower_bound_seconds: float
    status: Status
    builder: str
    builder_seconds: float

    @property
    def gap(self) -> float:
        return 1 - self.lower_bound_seconds / self.makespan_seconds if self.makespan_seconds else 0.0


def synthesize(
    chunks: Sequence[ChunkSeconds],
    rank_of: Sequence[int],
    micro_batches: int,
    transfer_seconds: Sequence[float] = (),
    *,
    memory: MemoryLimits | None = None,
    split_backward: bool = False,
    blocking: bool = False,
    effort: float = 12.0,
    workers: int = 2,
    name: str = "synthesized",
    rival_seconds: float = inf,
) -> Synthesis | None:
    """Return a schedule of the least makespan, never worse than the best builder's; None where a bound says that none takes less
    than `rival_seconds`. `rank_of[c]` is the rank of chunk c; seconds
    are those of `Clock.run` (while it searches, transfers between two ranks may overlap). `effort` is CP-SAT's deterministic time
    (about seconds), so that every machine ends with the same schedule. PlanError for lists of other lengths, Infeasible where one
    micro-batch does not fit on a rank."""
    _check_lengths(chunks, rank_of, transfer_seconds, memory)
    task = Task.of(chunks, rank_of, micro_batches, transfer_seconds, blocking, memory, split_backward)

    def makespan_of(schedule: Schedule) -> float:
        return max(rank.end_seconds for rank in ScheduleClock.of(schedule).run(chunks, transfer_seconds, blocking))

    def fits(schedule: Schedule) -> bool:
        return all(task.fits(actions, rank) for rank, actions in enumerate(schedule.ranks))

    def schedule_within_limits(order: Order) -> Schedule:
        """Return it with its backwards in two parts, or whole where what these leave for their weights does not fit."""
        schedule = task.schedule(name, order)
        return schedule if fits(schedule) else with_merged_backwards(schedule, lambda _: 0.0)

    def seconds_of(order: Order) -> float:
        schedule = schedule_within_limits(order)
        return makespan_of(schedule) if fits(schedule) else inf

    known_schedules = [(seconds_of(order), label, order) for label, order in known_orders(task)]
    if not known_schedules:
        raise Infeasible(_no_memory(task))
    builder_seconds, builder, order = min(known_schedules, key=lambda each: each[0])
    best, bound = builder_seconds, min(makespan_lower_bound(task), builder_seconds)
    if bound >= rival_seconds:
        return None
    if not _near(best, bound):
        actions = len(task.kinds) * len(task.rank_of) * task.micro_batches
        _, ruled = search_rules(task, best, order, bound, ceil(effort * _ACTIONS_PER_EFFORT / actions))
        best, order = min((best, order), (seconds_of(ruled), ruled), key=lambda each: each[0])
    if not _near(best, bound):
        found_order, proven = _Model(task, order, best, bound).solve(effort, workers)
        bound = min(best, max(bound, proven))
        if found_order:
            best, order = min((best, order), (seconds_of(found_order), found_order), key=lambda each: each[0])
    schedule = with_merged_backwards(schedule_within_limits(order), makespan_of)
    check(schedule)
    makespan = makespan_of(schedule)
    status = Status.OPTIMAL if _near(makespan, bound) else Status.FEASIBLE
    return Synthesis(
        schedule=schedule,
        makespan_seconds=makespan,
        lower_bound_seconds=min(bound, makespan),
        status=status,
        builder=builder,
        builder_seconds=builder_seconds,
    )


def _near(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + _OPTIMAL_GAP)


def _check_lengths(
    chunks: Sequence[ChunkSeconds], rank_of: Sequence[int], transfer_seconds: Sequence[float], memory: MemoryLimits | None
) -> None:
    many = len(chunks)
    if len(rank_of) != many or set(rank_of) != set(range(max(rank_of, default=-1) + 1)) or not many:
        raise PlanError(f"{many} chunks on ranks {list(rank_of)}: give each chunk a rank, from 0, none left out")
    if len(transfer_seconds) not in (0, many - 1):
        raise PlanError(f"{many} chunks have {many - 1} transfers between them, not {len(transfer_seconds)}")
    if memory and (len(memory.saved_bytes) != many or len(memory.deferred_bytes) not in (0, many)):
        raise PlanError(f"{many} chunks save {many} numbers of bytes: {len(memory.saved_bytes)}, {len(memory.deferred_bytes)}")
    if memory and len(memory.limit_bytes) != max(rank_of) + 1:
        raise PlanError(f"{max(rank_of) + 1} ranks have as many limits, not {len(memory.limit_bytes)}")


def _no_memory(task: Task) -> str:
    for rank in range(task.ranks):
        needed = sum(task.saved[chunk] for chunk in task.chunks_of(rank))
        if needed > task.limit[rank]:
            return f"one micro-batch saves {needed:.4g} bytes on pipeline rank {rank}, whose limit is {task.limit[rank]:.4g}"
    raise AssertionError


class _Model:
    """The CP-SAT model. Variables: when each action starts, in units."""

    def __init__(self, task: Task, order: Order, upper: float, bound: float) -> None:
        self.task, self.model = task, cp_model.CpModel()
        every = [seconds for chunk in task.seconds for seconds in chunk]
        self.unit = _unit([*every, *task.first, *task.last, *task.lags], upper)
        self.horizon = self.units(upper)
        self.known = {key: self.units(seconds) for key, seconds in start_seconds(task, order).items()}
        keys = [
            (chunk, kind, micro)
            for chunk in range(len(task.rank_of))
            for kind in task.kinds
            for micro in range(task.micro_batches)
        ]
        self.long = {key: self.units(task.duration(*key)) for key in keys}
        self.start = {key: self.variable(self.known[key]) for key in keys}
        self.add_order()
        for rank in range(task.ranks):
            self.add_rank(rank)
        self.end = self.model.new_int_var(max(0, self.units(bound)), self.horizon, "")
        for (chunk, kind, micro), start in self.start.items():
            if micro == task.micro_batches - 1:
                self.model.add(self.end >= start + self.long[chunk, kind, micro])
        self.model.add_hint(self.end, max(self.known[key] + self.long[key] for key in keys))
        self.model.minimize(self.end)

    def units(self, seconds: float) -> int:
        return floor(seconds / self.unit * (1 + 1e-12) + 1e-6)

    def variable(self, hint: int) -> cp_model.IntVar:
        variable = self.model.new_int_var(0, self.horizon, "")
        self.model.add_hint(variable, min(hint, self.horizon))
        return variable

    def add_order(self) -> None:
        """Add the order of actions: start(c, F, m) >= end(c - 1, F, m) + lag, and so on; start(c, k, m) >= end(c, k, m - 1)."""
        for (chunk, kind, micro), start in self.start.items():
            before = self.task.dependency(chunk, kind)
            if before is not None:
                key = before[0], before[1], micro
                self.model.add(start >= self.start[key] + self.long[key] + self.units(before[2]))
            if micro:
                key = chunk, kind, micro - 1
                self.model.add(start >= self.start[key] + self.long[key])

    def add_rank(self, rank: int) -> None:
        """Let a rank run one action at a time, with the memory in flight within its limit."""
        task, chunks = self.task, self.task.chunks_of(rank)
        actions = [key for key in self.start if task.rank_of[key[0]] == rank]
        self.model.add_no_overlap(
            [self.model.new_fixed_size_interval_var(self.start[key], self.long[key], "") for key in actions]
        )
        many, limit = task.micro_batches, task.limit[rank]
        if sum(task.saved[chunk] for chunk in chunks) * many <= limit:
            return
        for chunk in chunks:  # start(F, m) >= end(I, m - h): h fit whole; start(F, m) >= end(W, m - 1 - g): g fit beside it
            for micro in range(many):
                for kind, before in task.before_forward(chunk, micro):
                    key = chunk, kind, before
                    self.model.add(self.start[chunk, FORWARDS, micro] >= self.start[key] + self.long[key])
        # W right after I is a whole backward, which never holds what it defers: so no more than was saved counts until W
        held = {chunk: min(task.deferred[chunk], task.saved[chunk]) for chunk in chunks}
        same = not task.split or all(held[chunk] == task.saved[chunk] for chunk in chunks)
        if len(chunks) == 1 and same:
            return  # that says it all
        unit = _unit([*(task.saved[chunk] for chunk in chunks), *held.values()], limit)
        intervals, sizes = [], []
        for chunk in chunks:
            # rounded down, so that every order that fits is one of the model's: what it finds is checked
            saved, deferred = (floor(size / unit + 1e-6) for size in (task.saved[chunk], held[chunk]))
            for micro in range(many):
                if same:
                    parts = [(FORWARDS, False, task.last_kind, saved)]
                else:
                    parts = [(FORWARDS, False, BACKWARDS, saved), (BACKWARDS, True, WEIGHTS, deferred)]
                for first, after, last, size in parts:
                    intervals.append(self.span((chunk, first, micro), after, (chunk, last, micro)))
                    sizes.append(size)
        # sum of the sizes of what is saved at a time <= limit
        self.model.add_cumulative(intervals, sizes, floor(limit / unit + 1e-6))

    def span(self, first: tuple[int, int, int], after: bool, last: tuple[int, int, int]) -> cp_model.IntervalVar:
        """Return the interval from the start of an action, or from its end (`after`), to the end of another one."""
        extra = self.long[first] if after else 0
        size = self.variable(self.known[last] + self.long[last] - self.known[first] - extra)
        return self.model.new_interval_var(self.start[first] + extra, size, self.start[last] + self.long[last], "")

    def solve(self, effort: float, workers: int) -> tuple[Order, float]:
        """Return (order or nothing, a bound in seconds)."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.interleave_search = True  # without it the workers' answers arrive in the order of the clock
        solver.parameters.max_deterministic_time = effort
        solver.parameters.random_seed = 1
        solver.parameters.relative_gap_limit = _OPTIMAL_GAP / 2
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return (), -inf
        starts = {key: solver.value(variable) for key, variable in self.start.items()}

        def place(key: tuple[int, int, int]) -> tuple[int, bool, int, int]:
            chunk, kind, _ = key  # of actions that take nothing: in the order in which they wait for each other
            return starts[key], self.long[key] > 0, kind, -chunk if kind == BACKWARDS else chunk

        task = self.task
        ranks = [[key for key in starts if task.rank_of[key[0]] == rank] for rank in range(task.ranks)]
        return tuple(tuple(sorted(keys, key=place)) for keys in ranks), solver.best_objective_bound * self.unit


def _unit(values: Sequence[float], upper: float) -> float:
    """Return a number of which all `values` are multiples, or a small one."""
    positive = [value for value in values if value > upper * 1e-9]
    least = min(positive, default=upper or 1.0)
    for parts in range(1, 101):
        unit = least / parts
        if all(abs(value / unit - round(value / unit)) < 1e-7 for value in positive) and upper / unit < _UNITS:
            return unit
    return (upper or 1.0) / _UNITS
