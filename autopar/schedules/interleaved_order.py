"""The order in which micro-batches pass through the chunks of a stage: 1F1B, interleaved 1F1B and ZB-H1 share it."""

from __future__ import annotations


def group_of(stages: int, micro_batches: int) -> int:
    """How many micro-batches go through a chunk before the stage takes its next chunk: p, or as many more as make the groups
    equal (`ScheduleInterleaved1F1B` of torch: 10 micro-batches on 4 stages are two groups of 5)."""
    groups = max(1, micro_batches // stages)
    return stages if micro_batches % groups else micro_batches // groups


Passes = list[tuple[int, int]]
"""(chunk, micro-batch)."""


def interleaved_passes(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Passes, Passes]:
    """The order of the forwards and that of the backwards, in whole groups: what is beyond `micro_batches` is left out
    afterwards. That keeps the order free of deadlocks, since micro-batches do not depend on each other."""
    group = group_of(stages, micro_batches) if virtual > 1 else micro_batches
    starts = range(0, micro_batches, group)
    mine = range(rank, stages * virtual, stages)
    forward = [(chunk, micro) for at in starts for chunk in mine for micro in range(at, at + group)]
    backward = [(chunk, micro) for at in starts for chunk in reversed(mine) for micro in range(at, at + group)]
    return forward, backward
