"""ZB-H1: Qi et al., arXiv 2401.10241, section 2."""

from __future__ import annotations

from autopar.ir.schedule import FORWARD, INPUT, WEIGHT, Action
from autopar.schedules.builder import ScheduleBuilder, group_of, interleaved_passes


def zero_bubble_h1(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """1F1B with the split backward: a warm-up of ``(v - 1) g + p - s - 1`` forwards, and stage s computes weight gradients s
    backwards after the input gradients, so that every stage holds the micro-batches of stage 0. (`ScheduleInterleavedZeroBubble`
    of torch.)"""
    forward, backward = interleaved_passes(stages, virtual, micro_batches, rank)
    warm_up = min(len(forward), (virtual - 1) * group_of(stages, micro_batches) + stages - rank - 1)
    out = [Action(chunk, FORWARD, micro) for chunk, micro in forward[:warm_up]]
    for place, (chunk, micro) in enumerate(backward):
        if warm_up + place < len(forward):
            out.append(Action(forward[warm_up + place][0], FORWARD, forward[warm_up + place][1]))
        out.append(Action(chunk, INPUT, micro))
        if place >= rank:
            out.append(Action(backward[place - rank][0], WEIGHT, backward[place - rank][1]))
    out += [Action(chunk, WEIGHT, micro) for chunk, micro in backward[max(0, len(backward) - rank) :]]
    return tuple(each for each in out if each.micro_batch < micro_batches)


def bubble_passes(virtual: int, micro_batches: int) -> float:
    """Return the bubble: weight gradients fill two thirds of the bubble of 1F1B."""
    return 1 / 3 / virtual


BUILDER = ScheduleBuilder(
    name="zb-h1", position=3, actions=zero_bubble_h1, splits_backward=True, searched=True, bubble_passes=bubble_passes
)
