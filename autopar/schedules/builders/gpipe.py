"""GPipe: Huang et al., arXiv 1811.06965."""

from __future__ import annotations

from autopar.ir.schedule import BACKWARD, FORWARD, Action
from autopar.schedules.builder import ScheduleBuilder


def gpipe(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Return the actions of a stage: all forwards, then all backwards."""
    chunks, every = range(rank, stages * virtual, stages), range(micro_batches)
    forward = [Action(chunk, FORWARD, micro) for chunk in chunks for micro in every]
    return (*forward, *(Action(chunk, BACKWARD, micro) for chunk in reversed(chunks) for micro in every))


def in_flight(stages: int, virtual: int, micro_batches: int) -> float:
    """Return all micro-batches, between the forwards and the backwards."""
    return float(micro_batches)


BUILDER = ScheduleBuilder(name="gpipe", position=1, actions=gpipe, in_flight=in_flight)
