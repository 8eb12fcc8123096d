"""A lower bound of a pipeline under one schedule: a linear program that deals the calls to the chunks, and chooses what each
chunk saves and recomputes and how its state is sharded, so that the longest of the schedule's paths is shortest and every stage
fits.

It has no placements: a call takes what `bounds.call_lines` and `bounds.call_state` say at least. First with some paths through
the schedule, each of which bounds every partition; and where that is not enough, with the end of every action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache

import numpy

from autopar.cost_models.events.state_transfers import Edge
from autopar.ir.plan import Pipeline
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.solve.bounds.call_lines import DurationLine
from autopar.solve.bounds.frontier import SavedLine
from autopar.solve.bounds.schedule_paths import COARSE_GROUPS, FINE_GROUPS, KINDS, schedule_paths
from autopar.solve.bounds.stage_calls import BlockCalls, ClassCalls, Linear, StageLimits, transfers_of
from autopar.solve.bounds.timed_actions import TimedSchedule, spread_micro_batches, timed_schedule
from autopar.solve.ilp.linear_model import INFINITY, LinearModel, Status, add, total
from autopar.solve.ilp.solver import solve
from autopar.solve.ilp.solver_call import SolverName
from autopar.solve.space.pipeline_grid import ScheduleOption

_MAX_CLOCKED = 4_000
"""Actions of the schedules whose clock is looked at."""

_CLOCKED_ACTIONS = 800
"""Actions of longer ones that are looked at, about."""


class ScheduleDetail(IntEnum):
    """How closely a schedule is looked at: some paths with the stages in few groups or more, or the end of every action."""

    COARSE = 0
    FINE = 1
    CLOCK = 2


def schedule_bound(
    stages: int,
    option: ScheduleOption,
    micro_batches: int,
    calls: Sequence[BlockCalls],
    limits: StageLimits,
    detail: ScheduleDetail,
) -> float:
    """Return seconds below every plan of these calls under a schedule; infinite where none fits. A schedule that is too long for
    its clock is looked at as finely as can be."""
    if limits.usable_bytes <= 0:
        return INFINITY
    if detail is ScheduleDetail.CLOCK and 2 * stages * option.virtual * micro_batches > _MAX_CLOCKED:
        detail = ScheduleDetail.FINE
    return _Program((stages, option.virtual, option.schedule, micro_batches), calls, limits, detail).solve()


class _Program:
    """The linear program. Seconds are in `unit`, bytes in `limits.usable_bytes`. `columns`: ``[kind, class]``, the durations of
    one pass of all chunks of each class. With the clock those of each chunk too, of which only what its calls take is looked at
    where a class has several."""

    def __init__(
        self, key: tuple[int, int, str, int], calls: Sequence[BlockCalls], limits: StageLimits, detail: ScheduleDetail
    ) -> None:
        self.calls, self.limits, self.model, self.key = calls, limits, LinearModel(), key
        # a clock is mostly differences of two ends, which GLOP takes two thirds of HiGHS' time for; of paths it is the reverse
        self.solvers: tuple[SolverName, ...] = ("glop", "highs") if detail is ScheduleDetail.CLOCK else ("highs",)
        stages, _, _, micro_batches = key
        self.shape = schedule_paths(*key, (COARSE_GROUPS, FINE_GROUPS, max(stages, FINE_GROUPS))[detail])
        self.unit = sum(each.count * each.lines.durations[0].least_seconds for each in calls) * micro_batches / stages or 1.0
        self.sends = limits.between_chunks(self.shape.stage_of)
        model, classes = self.model, self.shape.classes
        self.t = model.variable()
        model.minimise({self.t: 1.0})
        self.columns = [[model.variable() for _ in classes] for _ in range(KINDS)]
        self.after = [model.variable() for _ in self.shape.groups]
        self.parts = [
            ClassCalls(calls, len(members), limits.overlap, self.unit, sum(map(self._on_data_links, members)))
            for members in classes
        ]
        self._deal(len(classes))
        for number in range(len(classes)):
            self._bound_class(number)
        for number in range(len(self.shape.groups)):
            self._bound_group(number)
        if detail is ScheduleDetail.CLOCK:
            self._add_clock(self._chunk_columns())
        else:
            self._add_paths()

    def _deal(self, classes: int) -> None:
        """Add the calls of each block in each class, their state by ZeRO stage, and what they save and recompute."""
        model = self.model
        for block, each in enumerate(self.calls):
            places = range(classes) if each.place is None else [0 if each.place == 0 else classes - 1]
            dealt = {}
            for place in places:
                parts = self.parts[place]
                count = model.variable(float(each.count))
                dealt[count] = 1.0
                sharded = tuple(model.variable() for _ in each.states)
                # calls = sum of those under each ZeRO stage
                model.row([(count, -1.0), *((column, 1.0) for column in sharded)], 0.0, 0.0)
                again, saved = model.variable(), model.variable()
                parts.counts[block], parts.sharded[block], parts.saved[block] = count, sharded, (again, saved)
                for line in each.lines.saved:
                    self._trade(line, again, saved, count)
                if each.lines.traded:
                    parts.longer[block] = longer = model.variable()
                    # seconds beyond the fastest calls >= recomputation
                    model.row([(longer, 1.0), (again, -1.0)], 0.0, INFINITY)
                    for line in each.lines.traded:
                        self._trade(line, longer, saved, count)
            # sum over classes = calls of the model
            model.row(dealt, float(each.count), float(each.count))

    def _trade(self, line: SavedLine, seconds: int, saved: int, count: int) -> None:
        """Add the row ``seconds x recompute + bytes x saved >= calls x least``."""
        terms = {seconds: line.recompute * self.unit, saved: line.saved * self.limits.usable_bytes, count: -line.least}
        self.model.row(terms, 0.0, INFINITY)

    def _on_data_links(self, chunk: int) -> float:
        """Return the seconds of a chunk's transfers in each pass, on links that the communication of its state uses too."""
        both = self.sends[max(0, chunk - 1) : chunk + 1]
        return max((each.seconds for each in both if each.on_data_links), default=0.0)

    def _bound_class(self, number: int) -> None:
        """Bound the durations of a class's chunks, each of which has a call: what its calls take; with the gathers that it waits
        for and what overlaps compute, which slows it; and at least what is sent."""
        model, part, contention = self.model, self.parts[number], self.limits.overlap.contention
        columns = [each[number] for each in self.columns]
        model.row({count: 1.0 for count in part.counts.values()}, float(part.size), INFINITY)
        gather, again, reduction = part.transfers
        # a chunk waits for the gathers that begin its passes; the reduction of its first call runs beside its next forward
        waits = [self._positive(part.at_edge(each, Edge.EXPOSED)) for each in (gather, again)]
        left = self._positive(part.at_edge(reduction, Edge.LEFT))
        for line, direction in enumerate(self.calls[0].lines.durations):
            computed = part.computed(line)
            waited = dict(zip(waits, (direction.forward, direction.inputs), strict=True))
            for longer, inner_passes in _passes(columns, direction):
                sent, least_sent = part.sent(direction, inner_passes)
                sent = {**sent, left: part.holds_left(direction, inner_passes)}
                self._exceeds(longer, computed, 0.0)
                if any(sent.values()) or least_sent > 0:
                    slowed = total((1.0, computed), (contention, sent), (1 - contention, waited))
                    self._exceeds(longer, slowed, contention * least_sent)
                    if direction.weights or not direction.inputs:  # gradients of weights hide what is sent, too
                        self._exceeds(longer, sent, least_sent)
        self._bound_last(number, columns)

    def _positive(self, linear: Linear) -> int:
        """Add a column that is at least this, and not negative."""
        column = self.model.variable()
        self._exceeds({column: 1.0}, *linear)
        return column

    def _chunk_columns(self) -> dict[int, list[int]]:
        """Return the durations of each chunk."""
        out: dict[int, list[int]] = {}
        for number, members in enumerate(self.shape.classes):
            columns = [each[number] for each in self.columns]
            if len(members) == 1:
                out[members[0]] = columns
                continue
            out.update((chunk, [self.model.variable() for _ in columns]) for chunk in members)
            for kind, column in enumerate(columns):
                # durations of a class = sum of those of its chunks
                self.model.row({column: -1.0, **{out[chunk][kind]: 1.0 for chunk in members}}, 0.0, 0.0)
            self._bound_each(number, out)
        return out

    def _bound_each(self, number: int, chunks: Mapping[int, Sequence[int]]) -> None:
        """Bound each chunk of a class by what its calls take, without recomputation and state."""
        model, part, members = self.model, self.parts[number], self.shape.classes[number]
        counts = {block: [model.variable() for _ in members] for block in part.counts}
        for block, columns in counts.items():
            # calls of a class = sum of those of its chunks
            model.row({part.counts[block]: -1.0, **dict.fromkeys(columns, 1.0)}, 0.0, 0.0)
        for place, chunk in enumerate(members):
            has = {block: columns[place] for block, columns in counts.items()}
            model.row(dict.fromkeys(has.values(), 1.0), 1.0, INFINITY)
            sends = self.limits.overlap.contention * self._on_data_links(chunk) / self.unit
            for line, direction in enumerate(self.calls[0].lines.durations):
                least = {block: self.calls[block].lines.durations[line].least_seconds for block in has}
                terms = {column: least[block] / self.unit for block, column in has.items()}
                for longer, inner_passes in _passes(chunks[chunk], direction):
                    self._exceeds(longer, terms, sends * transfers_of(direction, inner_passes))

    def _exceeds(self, longer: Mapping[int, float], terms: Mapping[int, float], constant: float) -> None:
        """Add the row ``longer >= terms + constant``."""
        self.model.row(total((1.0, longer), (-1.0, terms)), constant, INFINITY)

    def _bound_last(self, number: int, columns: Sequence[int]) -> None:
        """Bound the last backward of a chunk, which leaves the first call's reduction to its end."""
        part, overlap = self.parts[number], self.limits.overlap
        if not overlap.gradient_reduction or overlap.gradient_buffers:
            return
        forward, inputs, _, first, last = columns
        slowed = {column: overlap.contention * one.reduce_last / self.unit for column, one in part.states()}
        longest = max((one.reduce_last for each in self.calls for one in each.states), default=0.0)
        terms = total((1.0, part.computed(0)), (1.0, slowed))
        for one in (first, forward):
            self._exceeds({one: 1.0, inputs: 1.0, last: 1.0}, terms, -part.size * overlap.contention * longest / self.unit)

    def _bound_group(self, group: int) -> None:
        """Bound the memory of the stages of a group together, and on average what follows their last action: a reduction and the
        optimizer."""
        model, usable, stages = self.model, self.limits.usable_bytes, self.shape.groups[group]
        classes_here = [number for number, of in enumerate(self.shape.group_of_class) if of == group]
        optimizer: dict[int, float] = {}
        held: dict[int, float] = {}
        for number in classes_here:
            for column, one in self.parts[number].states():
                optimizer[column] = -one.optimizer_seconds / self.unit
                held[column] = one.bytes / usable
        heads = [each for each in self.calls if (each.place == 0) == (0 in stages)] or list(self.calls)
        left = min((one.reduce_last for each in heads for one in each.states), default=0.0)
        model.row({self.after[group]: float(len(stages)), **optimizer}, len(stages) * left / self.unit, INFINITY)
        # the first backward is that of a call of the last chunk
        working = min(self.calls[block].lines.working_bytes for block in self.parts[classes_here[-1]].counts)
        for in_flight in self.shape.in_flight[group]:
            saved = {
                column: self.limits.held * in_flight.get(number, 0)
                for number in classes_here
                for _, column in self.parts[number].saved.values()
            }
            # sum over the stages: state + reserved for what is saved and for the first backward <= usable
            model.row({**held, **saved}, -INFINITY, len(stages) * (1.0 - self.limits.held * working / usable))

    def _add_paths(self) -> None:
        """Add the longest of some paths through the schedule."""
        for path in self.shape.paths:
            counts = numpy.stack([path.counts[:, list(members)].min(axis=1) for members in self.shape.classes], axis=1)
            terms = {
                column: count
                for columns, each in zip(self.columns, counts.tolist(), strict=True)
                for column, count in zip(columns, each, strict=True)
                if count
            }
            # t >= sum of the path + its transfers + what follows on its last stage
            sends = sum(count * each.seconds for count, each in zip(path.sends.tolist(), self.sends, strict=True))
            self._exceeds({self.t: 1.0}, {self.after[path.end]: 1.0, **terms}, sends / self.unit)

    def solve(self) -> float:
        """Return the seconds; 0 where the solver fails, infinite where nothing fits."""
        for solver in self.solvers:  # the next one where GLOP is imprecise, or says that nothing fits
            outcome = solve(self.model, relaxed=True, solver=solver)
            if outcome.status is Status.OPTIMAL:
                return outcome.bound * self.unit
        return INFINITY if outcome.status is Status.INFEASIBLE else 0.0

    def _add_clock(self, chunks: Mapping[int, Sequence[int]]) -> None:
        """Add the ends of all actions."""
        model, timed = self.model, _timed(*self.key)
        slots = [each for chunk in range(len(chunks)) for each in _slots(chunks[chunk])]

        def busy(times: Mapping[int, int]) -> dict[int, float]:
            out: dict[int, float] = {}
            for slot, count in times.items():
                add(out, dict.fromkeys(slots[slot], float(count)))
            return out

        ends = [model.variable() for _ in timed.actions]
        for end, action in zip(ends, timed.actions, strict=True):
            before = {ends[action.before]: 1.0} if action.before >= 0 else {}
            self._exceeds({end: 1.0}, {**before, **busy(action.busy)}, 0.0)
            if action.after >= 0:
                lag = self.sends[action.cut].seconds / self.unit
                self._exceeds({end: 1.0}, {ends[action.after]: 1.0, **busy({action.slot: 1})}, lag)
        for stage, (last, rest) in enumerate(timed.ends):
            # t >= the last of them + what the stage does after it + what follows
            self._exceeds({self.t: 1.0}, {ends[last]: 1.0, self.after[stage]: 1.0, **busy(rest)}, 0.0)


def _slots(columns: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The durations whose sum is in each slot of the clock's table, of one chunk."""
    forward, inputs, weights, first, last = columns
    return (forward,), (inputs, weights), (inputs,), (weights,), (first,), (inputs, last), (last,)


def _passes(columns: Sequence[int], direction: DurationLine) -> Iterator[tuple[dict[int, float], int]]:
    """Yield what a direction says of a forward and a backward of one micro-batch, as terms; and how many of them are neither the
    first nor the last of the step."""
    forward, inputs, weights, first, last = columns
    done = set[tuple[int, ...]]()
    for one, other, inner_passes in ((forward, weights, 2), (forward, last, 1), (first, weights, 0), (first, last, 0)):
        three = {one: direction.forward, inputs: direction.inputs, other: direction.weights}
        longer = {column: weight for column, weight in three.items() if weight}
        if tuple(longer) not in done:
            done.add(tuple(longer))
            yield longer, inner_passes


@lru_cache(maxsize=64)
def _timed(stages: int, virtual: int, schedule: str, micro_batches: int) -> TimedSchedule:
    actions = schedule_of(Pipeline(stages, virtual, schedule), micro_batches)
    share = _CLOCKED_ACTIONS / (2 * stages * virtual * micro_batches)
    return timed_schedule(actions, range(micro_batches) if share >= 1 else spread_micro_batches(stages, micro_batches, share))
