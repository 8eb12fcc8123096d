"""A schedule on its clock, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedules.clock import ActionSpan

LEGEND = (
    "F forward, B backward, I gradient of the inputs, W of the weights, then the micro-batch; small letters: every second chunk"
)
_LEAST = 2
"""Columns of a usual action: its letter and a digit."""

_LEFT_OUT = " ~ "
_FILL = {"F": "-", "B": "=", "I": "+", "W": "."}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A line for each rank. `left_out`: the seconds (from, to) in the middle that did not fit, which are at `_LEFT_OUT`."""

    lines: tuple[str, ...]
    left_out: tuple[float, float] | None


def draw(ranks: Sequence[Sequence[ActionSpan]], width: int) -> Drawing:
    """Draw ranks in `width` columns at most, without the ranks' names. Where actions are too narrow, the middle is left out."""
    spans = [span for rank in ranks for span in rank]
    end = max((span.end_seconds for span in spans), default=0.0)
    if not end:
        return Drawing(("",) * len(ranks), None)
    lengths = sorted(span.end_seconds - span.start_seconds for span in spans)
    usual = next((each for each in lengths[len(lengths) // 10 :] if each > 0), end)
    columns_per_second = max(width / end, _LEAST / usual)
    whole = int(end * columns_per_second + 0.5)
    chunks = [sorted({span.action.chunk for span in rank}) for rank in ranks]
    lines = [_line(rank, columns_per_second, whole, chunks_here) for rank, chunks_here in zip(ranks, chunks, strict=True)]
    if whole <= width:
        return Drawing(tuple(lines), None)
    shown = width - len(_LEFT_OUT)
    first = max(0, shown - shown // 2)
    last = whole - max(0, shown // 2)
    out = tuple(line[:first] + _LEFT_OUT + line[last:] for line in lines)
    return Drawing(out, (first / columns_per_second, last / columns_per_second))


def _line(rank: Sequence[ActionSpan], columns_per_second: float, whole: int, chunks: Sequence[int]) -> str:
    line = [" "] * whole
    for span in rank:
        first, last = (int(at * columns_per_second + 0.5) for at in (span.start_seconds, span.end_seconds))
        action = span.action
        letter = action.kind.lower() if chunks.index(action.chunk) % 2 else action.kind
        columns, number = last - first, str(action.micro_batch)
        digits = number if len(number) < columns else number[-1:]
        line[first:last] = (letter + digits).ljust(columns, _FILL[action.kind])[:columns]
    return "".join(line)
