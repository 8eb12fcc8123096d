"""How the calls of a pipeline may be dealt to its stages, as part of a linear program: which of them hold few micro-batches.

No stage has more calls than it can compute in a step, all blocks together; and every chunk has a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf

from autopar.solve.ilp.linear_model import INFINITY, LinearModel

_ROUNDING = 1e-9

_Column = tuple[int, int]
"""The share of a block's calls at a level, and the micro-batches that it has in flight."""


@dataclass(frozen=True, slots=True)
class CallLevel:
    """Parts of a pipeline whose calls hold `in_flight` micro-batches at least: so many `stages`, or so many `chunks` beside the
    first one of their stages, with one call each."""

    in_flight: int
    stages: int = 0
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class CallLevels:
    """`virtual`: chunks of a stage, at least. `seconds`: of one call of each block in a step, at least; stages take no longer
    than `step_seconds`."""

    levels: tuple[CallLevel, ...]
    virtual: int
    seconds: Mapping[str, float]
    step_seconds: float

    def add_to(self, model: LinearModel, counts: Mapping[str, float]) -> dict[str, list[_Column]]:
        """Columns of a program for blocks with so many calls. A block with one call is where least is in flight."""
        several = {name: count for name, count in counts.items() if count > 1}
        least = min(level.in_flight for level in self.levels)
        out = {name: [(model.variable(1.0, lower=1.0), least)] for name in counts if name not in several}
        for name, count in several.items():
            most = [self._most_calls(level, name, self._apart(len(out))) for level in self.levels]
            columns = [model.variable(min(1.0, each / count)) for each in most]
            # sum of the shares = 1
            model.row([(column, 1.0) for column in columns], 1.0, 1.0)
            out[name] = [(column, level.in_flight) for column, level in zip(columns, self.levels, strict=True)]
        if several:
            self._bound_levels(model, several, out)
        return out

    def _apart(self, single: int) -> int:
        """Calls of a stage that are chunks beside its first one, where blocks with one call are as many of these as may be."""
        return max(0, self.virtual - 1 - single)

    def _most_calls(self, level: CallLevel, name: str, apart: int) -> float:
        """Of one block."""
        if level.chunks:
            return level.chunks
        seconds = self.seconds[name]
        most = floor(self.step_seconds / seconds * (1 + _ROUNDING)) if seconds and self.step_seconds < inf else inf
        return level.stages * max(1.0, most - apart)

    def _bound_levels(self, model: LinearModel, counts: Mapping[str, float], columns: Mapping[str, Sequence[_Column]]) -> None:
        """Of all blocks with several calls together."""
        apart, chunks = self._apart(len(columns) - len(counts)), 0
        least = min(self.seconds[name] for name in counts)
        beside: dict[int, float] = {}
        for number, level in enumerate(self.levels):
            calls = {columns[name][number][0]: count for name, count in counts.items()}
            if level.chunks:
                # calls <= chunks
                model.row(calls, -INFINITY, level.chunks)
                beside |= calls
                chunks += level.chunks
            elif self.step_seconds < inf:
                # seconds of the calls <= those of the stages, without the chunks beside the first ones
                seconds = {columns[name][number][0]: count * self.seconds[name] for name, count in counts.items()}
                left = self.step_seconds * (1 + _ROUNDING) - apart * least
                scaled = {column: each / self.step_seconds for column, each in seconds.items()}
                model.row(scaled, -INFINITY, level.stages * left / self.step_seconds)
        # calls beside the first chunks >= these chunks, but for blocks of one call
        model.row(beside, chunks - (len(columns) - len(counts)), INFINITY)
