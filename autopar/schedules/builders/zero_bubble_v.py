"""ZB-V: Qi et al., arXiv 2401.10241, section 6, in the order of torch's `ScheduleZBVZeroBubble`."""

from __future__ import annotations

from autopar.ir.schedule import FORWARD, INPUT, WEIGHT, Action
from autopar.schedules.builder import ScheduleBuilder, VShapedStage, v_bubble


def zero_bubble_v(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Return the actions of a stage. Fewer than ``2 p - 1`` micro-batches run in the order of so many, without the others."""
    many = max(2 * stages - 1, micro_batches)
    out = VShapedStage(stages, rank)
    out.add(*["F0"] * (2 * (stages - rank) - 1), *["F1", "F0"] * rank, *["F1", "I1", "W1"] * (stages - rank))
    while out.count(1, FORWARD) < out.count(0, FORWARD) or out.count(0, FORWARD) < many:
        out.add(*["F0"] * (out.count(0, FORWARD) < many), "I0", "W0", "F1", "I1", "W1")
    out.add(*["I0", "I1"] * rank, *["I0", "W0"] * (stages - rank))
    for way in (1, 0):
        out.add(*[f"W{way}"] * (out.count(way, INPUT) - out.count(way, WEIGHT)))
    return tuple(each for each in out.actions if each.micro_batch < micro_batches)


BUILDER = ScheduleBuilder(
    name="zbv", position=4, actions=zero_bubble_v, v_shaped=True, splits_backward=True, searched=True, bubble_passes=v_bubble
)
