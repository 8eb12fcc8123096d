"""No overlap between stages: one micro-batch after the other runs through the whole pipeline."""

from __future__ import annotations

from autopar.ir.schedule import BACKWARD, FORWARD, Action
from autopar.schedules.builder import ScheduleBuilder


def naive(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Return the actions of a stage: all forwards and all backwards of a micro-batch before the next one."""
    chunks = range(rank, stages * virtual, stages)
    each = [(chunk, FORWARD) for chunk in chunks] + [(chunk, BACKWARD) for chunk in reversed(chunks)]
    return tuple(Action(chunk, kind, micro) for micro in range(micro_batches) for chunk, kind in each)


def bubble_passes(virtual: int, micro_batches: int) -> float:
    """Return the bubble: every micro-batch waits for every stage."""
    return float(micro_batches)


def in_flight(stages: int, virtual: int, micro_batches: int) -> float:
    """Return one micro-batch."""
    return 1.0


BUILDER = ScheduleBuilder(name="naive", position=0, actions=naive, bubble_passes=bubble_passes, in_flight=in_flight)
