"""The least durations and bytes of the calls of some chunks of a pipeline, as terms of the linear program of
`pipeline.schedule_bound`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopar.cost_models.events.state_transfers import Edge, Transfer, step_transfers
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.solve.bounds.call_lines import CallLines, DurationLine
from autopar.solve.bounds.call_state import CallState
from autopar.solve.bounds.cut_transfers import StageTransfer

Linear = tuple[dict[int, float], float]
"""Terms by column, and a constant."""


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """All calls of one block in the model: how many, and what each takes. `place`: 0 where the first chunk has all of them, -1
    where the last one has; None where any may."""

    count: int
    place: int | None
    lines: CallLines
    states: tuple[CallState, ...]


@dataclass(frozen=True, slots=True)
class StageLimits:
    """The limits of a stage: `usable_bytes`; `held`: what the allocator reserves for a byte that is saved; `transfers`: from each
    stage to the next (none: they take no time)."""

    usable_bytes: float
    held: float
    overlap: Overlap
    transfers: tuple[StageTransfer, ...] = ()

    def between_chunks(self, stage_of: Sequence[int]) -> tuple[StageTransfer, ...]:
        """Return the transfers from each chunk to the next. Chunks that follow each other lie on neighbours, on the last and the
        first stage, or on one."""
        out = []
        for stage, after in pairwise(stage_of):
            number = min(stage, after) if abs(stage - after) == 1 else -1
            out.append(self.transfers[number] if self.transfers and stage != after else StageTransfer())
        return tuple(out)


@dataclass(frozen=True, slots=True)
class ClassCalls:
    """The calls of `size` chunks. Seconds are in `unit`. By block: the columns of its calls, of those under each ZeRO stage, and
    of their recomputed seconds and saved bytes; `longer`: of their seconds beyond the first line. `sends`: seconds on the links
    of the data axis in each pass of all chunks."""

    calls: Sequence[BlockCalls]
    size: int
    overlap: Overlap
    unit: float
    sends: float
    counts: dict[int, int] = field(default_factory=dict)
    sharded: dict[int, tuple[int, ...]] = field(default_factory=dict)
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    longer: dict[int, int] = field(default_factory=dict)

    @property
    def transfers(self) -> tuple[Transfer, Transfer, Transfer]:
        """The gathers of a later forward and of a backward, and the reduction."""
        order = step_transfers(self.overlap, pipelined=True)
        assert order.backward.reduction is not None
        return order.forward.gather, order.backward.gather, order.backward.reduction

    def states(self) -> Iterator[tuple[int, CallState]]:
        """The columns of the calls under each ZeRO stage."""
        for block, columns in self.sharded.items():
            yield from zip(columns, self.calls[block].states, strict=True)

    def computed(self, line: int, state: Mapping[int, float] | None = None) -> dict[int, float]:
        """Return the terms that durations by a line have to exceed; `state`: seconds of sharded calls beside the accumulation."""
        terms: dict[int, float] = {}
        for block, count in self.counts.items():
            each = self.calls[block].lines.durations[line]
            terms[count] = each.least_seconds / self.unit
            beyond = self.longer.get(block) if line == 0 else None
            terms[self.saved[block][0] if beyond is None else beyond] = each.inputs
            for column, one in zip(self.sharded[block], self.calls[block].states, strict=True):
                terms[column] = each.inputs * one.accumulate_seconds / self.unit + (state or {}).get(column, 0.0)
        return terms

    def sent(self, direction: DurationLine, inner_passes: int) -> Linear:
        """Seconds of gathers, reductions and transfers to other stages in each forward and backward. `inner_passes`: 0 for the
        first forward of a step, where transfers may run while the stage waits anyway; 1 for a forward after it; 2 for such a
        forward and a backward before the last: what the backward leaves over, its transfers and the reduction of the first call,
        ends there."""
        gather, again, reduction = self.transfers
        reduced = reduction.overlaps and not self.overlap.gradient_buffers
        both = inner_passes == 2 and direction.forward > 0 and direction.inputs > 0
        terms = dict[int, float]()
        for column, one in self.states():
            backward = again.seconds(one) + (reduction.seconds(one) if reduced or both else 0.0)
            terms[column] = (direction.forward * gather.seconds(one) + direction.inputs * backward) / self.unit
        longest = 0.0 if both else max((reduction.seconds(one) for _, one in self.states()), default=0.0) * reduced
        return terms, (transfers_of(direction, inner_passes) * self.sends - direction.inputs * longest * self.size) / self.unit

    def holds_left(self, direction: DurationLine, inner_passes: int) -> float:
        """Return whether `sent` leaves out what the reduction of the first call says of a next forward."""
        return direction.forward if inner_passes and not (inner_passes == 2 and direction.inputs) else 0.0

    def least_of_one(self, seconds: Mapping[int, float]) -> Linear:
        """Return the seconds of one call of each chunk, where all of its calls have such seconds."""
        least = min((each for each in seconds.values() if each), default=0.0) / self.unit
        return {column: -least for column, each in seconds.items() if not each}, least * self.size

    def at_edge(self, transfer: Transfer, edge: Edge) -> Linear:
        """Return the transfer of the one call of each chunk that has no call to overlap with, where this becomes of it."""
        return self.least_of_one({column: transfer.seconds(one) * (transfer.edge is edge) for column, one in self.states()})


def transfers_of(direction: DurationLine, inner_passes: int) -> float:
    """Return how often a chunk's transfers run beside a forward and a backward. `inner_passes`: as in `ClassCalls.sent`."""
    return direction.forward * min(inner_passes, 1 + (direction.inputs > 0))
