"""1F1B, and with several chunks a stage interleaved 1F1B: Narayanan et al., arXiv 2104.04473, sections 2.2.1 and 2.2.2."""

from __future__ import annotations

from autopar.ir.schedule import BACKWARD, FORWARD, Action
from autopar.schedules.builder import ScheduleBuilder, group_of, interleaved_passes, stages_in_flight


def one_forward_one_backward(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Return the actions of a stage. Stage s runs ``p - s - 1`` forwards as warm-up, then one forward and one backward in turn.
    With v chunks micro-batches go in groups of g through the chunks, and the warm-up has ``2 (p - s - 1) + (v - 1) g``
    forwards."""
    following = stages - rank - 1
    warm_up = following if virtual == 1 else 2 * following + (virtual - 1) * group_of(stages, micro_batches)
    forward, backward = interleaved_passes(stages, virtual, micro_batches, rank)
    warm_up = min(warm_up, len(forward))
    out = [Action(chunk, FORWARD, micro) for chunk, micro in forward[:warm_up]]
    for place, (chunk, micro) in enumerate(backward):
        if warm_up + place < len(forward):
            out.append(Action(forward[warm_up + place][0], FORWARD, forward[warm_up + place][1]))
        out.append(Action(chunk, BACKWARD, micro))
    return tuple(each for each in out if each.micro_batch < micro_batches)


def in_flight(stages: int, virtual: int, micro_batches: int) -> float:
    """Return the mean of p on the first stage and one on the last."""
    return (stages + 1) / 2 if virtual == 1 else stages_in_flight(stages, virtual, micro_batches)


BUILDER = ScheduleBuilder(
    name="1f1b", position=2, actions=one_forward_one_backward, searched=True, interleaved=True, in_flight=in_flight
)
