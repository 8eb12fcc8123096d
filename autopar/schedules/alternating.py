"""One forward and one backward in turn: 1F1B, 1F1B over several chunks of a rank (interleaved), and ZB-H1.

1F1B: Narayanan et al., arXiv 2104.04473, sections 2.2.1 and 2.2.2. ZB-H1: Qi et al., arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action


def group_of(stages: int, micro_batches: int) -> int:
    """How many micro-batches go through a chunk before the rank takes its next chunk: p, or as many more as make the groups
    equal (`ScheduleInterleaved1F1B` of torch: 10 micro-batches on 4 ranks are two groups of 5)."""
    groups = max(1, micro_batches // stages)
    return stages if micro_batches % groups else micro_batches // groups


def one_forward_one_backward(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Rank s runs ``p - s - 1`` forwards ahead, then one forward and one backward in turn. With v chunks micro-batches go in
    groups of g through the chunks, and ``2 (p - s - 1) + (v - 1) g`` run ahead."""
    behind = stages - rank - 1
    ahead = behind if virtual == 1 else 2 * behind + (virtual - 1) * group_of(stages, micro_batches)
    forward, backward = _passes(stages, virtual, micro_batches, rank)
    ahead = min(ahead, len(forward))
    out = [Action(chunk, FORWARD, micro) for chunk, micro in forward[:ahead]]
    for place, (chunk, micro) in enumerate(backward):
        if ahead + place < len(forward):
            out.append(Action(forward[ahead + place][0], FORWARD, forward[ahead + place][1]))
        out.append(Action(chunk, BACKWARD, micro))
    return tuple(each for each in out if each.micro_batch < micro_batches)


def zero_bubble_h1(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """1F1B with the backward in two parts: ``(v - 1) g + p - s - 1`` forwards run ahead, and rank s does the weights' part s
    backwards later, so that every rank holds the micro-batches of rank 0. (`ScheduleInterleavedZeroBubble` of torch.)"""
    forward, backward = _passes(stages, virtual, micro_batches, rank)
    ahead = min(len(forward), (virtual - 1) * group_of(stages, micro_batches) + stages - rank - 1)
    out = [Action(chunk, FORWARD, micro) for chunk, micro in forward[:ahead]]
    for place, (chunk, micro) in enumerate(backward):
        if ahead + place < len(forward):
            out.append(Action(forward[ahead + place][0], FORWARD, forward[ahead + place][1]))
        out.append(Action(chunk, INPUT, micro))
        if place >= rank:
            out.append(Action(backward[place - rank][0], WEIGHT, backward[place - rank][1]))
    out += [Action(chunk, WEIGHT, micro) for chunk, micro in backward[max(0, len(backward) - rank) :]]
    return tuple(each for each in out if each.micro_batch < micro_batches)


def _passes(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(chunk, micro-batch) in the order of the forwards and of the backwards, in whole groups: what is beyond `micro_batches` is
    left out afterwards. That keeps the order free of deadlocks, since micro-batches do not depend on each other."""
    group = group_of(stages, micro_batches) if virtual > 1 else micro_batches
    starts = range(0, micro_batches, group)
    mine = range(rank, stages * virtual, stages)
    forward = [(chunk, micro) for at in starts for chunk in mine for micro in range(at, at + group)]
    backward = [(chunk, micro) for at in starts for chunk in reversed(mine) for micro in range(at, at + group)]
    return forward, backward
