"""A lower bound of the makespan of every schedule of a task."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autopar.schedules.synthesis.task import BACKWARDS, FORWARDS, WEIGHTS, Task


def makespan_lower_bound(task: Task) -> float:
    """Return the way of one micro-batch there and back, or the largest over ranks of these:

    With h when the first input is there, w the rank's work, t the way from the end of its last action to the end of the step:
    ``h + w + t``. Where memory binds: before the first backward can begin at b, a rank does no more forwards than fit in
    memory, f; ``b + w - f + t``. When its last forward begins no more backwards are left than those of what it holds then, g;
    with z the way from the end of that forward to the last chunk and back, to the end of the step: ``h + w - g + z``. And,
    unless memory suffices for all, both: ``b + w - f - g + z``.
    """
    last, many = len(task.rank_of) - 1, task.micro_batches
    ways = [
        task.duration(0, FORWARDS, micro) + _forward_path(task, 0, last, micro) + _backward_path(task, last, micro)
        for micro in (0, many - 1)
    ]
    return max(*ways, _dependency_bound(task), *(_rank_bound(task, rank) for rank in range(task.ranks)))


def _dependency_bound(task: Task) -> float:
    """Return when the last action ends if ranks do any number of actions at once: what is left is the order of each kind on a
    chunk, what actions wait for, and backwards for which forwards wait since memory does not suffice for all."""
    last, many = len(task.rank_of) - 1, task.micro_batches
    ends: dict[tuple[int, int, int], float] = {}
    for micro in range(many):
        for kind in task.kinds:
            for chunk in range(last + 1) if kind == FORWARDS else range(last, -1, -1):
                start = ends.get((chunk, kind, micro - 1), 0.0)
                if kind == FORWARDS:
                    start = max([start, *(ends[chunk, *other] for other in task.before_forward(chunk, micro))])
                    start = max(start, ends[chunk - 1, kind, micro] + task.lags[chunk - 1] if chunk else 0.0)
                elif kind == BACKWARDS and chunk < last:
                    start = max(start, ends[chunk + 1, kind, micro] + task.lags[chunk])
                else:
                    start = max(start, ends[chunk, kind - 1, micro])
                ends[chunk, kind, micro] = start + task.duration(chunk, kind, micro)
    return max(ends.values())


def _forward_path(task: Task, chunk: int, to: int, micro: int) -> float:
    """Return the seconds from the end of a forward of `chunk` to the end of that of `to`."""
    return sum(task.lags[at] + task.duration(at + 1, FORWARDS, micro) for at in range(chunk, to))


def _backward_path(task: Task, chunk: int, micro: int) -> float:
    """Return the seconds from the begin of a backward of `chunk` until its micro-batch has all of its backwards from there on."""
    most = passed = 0.0
    for at in range(chunk, -1, -1):
        passed += task.duration(at, BACKWARDS, micro)
        most = max(most, passed + (task.duration(at, WEIGHTS, micro) if task.split else 0.0))
        passed += task.lags[at - 1] if at else 0.0
    return most


def _rank_bound(task: Task, rank: int) -> float:
    chunks, last, many = task.chunks_of(rank), len(task.rank_of) - 1, task.micro_batches
    low, high, work = chunks[0], chunks[-1], task.busy_seconds(rank)
    input_at = task.duration(0, FORWARDS, 0) + _forward_path(task, 0, low, 0) - task.duration(low, FORWARDS, 0)
    backward_at = task.duration(0, FORWARDS, 0) + _forward_path(task, 0, last, 0)
    backward_at += sum(task.duration(at, BACKWARDS, 0) + task.lags[at - 1] for at in range(last, high, -1))
    # Parts of weights may fill the rank to the end; whole backwards leave the way to the first chunk.
    tail = 0.0 if task.split else _backward_path(task, low, many - 1) - task.duration(low, BACKWARDS, many - 1)
    way = _forward_path(task, high, last, many - 1) + _backward_path(task, last, many - 1)
    limit = task.limit[rank] if any(task.saved[chunk] for chunk in chunks) else inf
    ahead = sum(max(0.0, task.first[chunk] - task.seconds[chunk][FORWARDS]) for chunk in chunks)
    ahead += _most_in_memory([(task.seconds[chunk][FORWARDS], task.saved[chunk], many) for chunk in chunks], limit)
    left = sum(max(0.0, task.last[chunk] - task.seconds[chunk][task.last_kind]) for chunk in chunks)
    left = min(work, left + _held_backwards(task, chunks, limit))
    out = max(input_at + work + tail, backward_at + work - ahead + tail, input_at + work - left + way)
    if limit < many * sum(task.saved[chunk] for chunk in chunks):
        out = max(out, backward_at + work - ahead - left + way)
    return out


def _held_backwards(task: Task, chunks: Sequence[int], limit: float) -> float:
    """Return the most seconds of backwards that are left of what is held: of a micro-batch all of them, or only its weights."""
    best = 0.0
    for chunk in chunks:
        _, inputs, weights = task.seconds[chunk]
        for seconds, size in ((inputs + weights, task.saved[chunk]), (weights, task.deferred[chunk])):
            best = max(best, (seconds / size if size else inf) if seconds else 0.0)
    return best * limit if best else 0.0


def _most_in_memory(items: Sequence[tuple[float, float, int]], limit: float) -> float:
    """Return the most seconds of (seconds, bytes, how many at most) in `limit` bytes, parts of one counted."""
    total = 0.0
    for seconds, size, many in sorted(items, key=lambda item: -(item[0] / item[1] if item[1] else inf)):
        count = min(float(many), limit / size) if size else float(many)
        total += count * seconds
        limit -= count * size
    return total
