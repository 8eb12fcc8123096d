"""The differences between ranks that run one text: numbers and parts that follow from a coordinate. All else is equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.checker.modules.recording import RecordedLine, Recording, WrongLine
from autopar.checker.modules.values import VARYING, RankDifference
from autopar.checker.shards import Cut, Kind

_PARTS = ("aten.split", "aten.split_with_sizes", "aten.chunk")


@dataclass(frozen=True, slots=True)
class RanksOfAxis:
    """The recordings of ranks along one axis, and their coordinates there."""

    recordings: Sequence[Recording]
    coordinates: tuple[int, ...]

    def differences(self) -> dict[int, RankDifference]:
        """Return the part that differs of each line, by its number. WrongLine where a rank runs other operations."""
        first, out = self.recordings[0].lines, dict[int, RankDifference]()
        makers = {made.name: (line, index) for line in first for index, made in enumerate(line.results)}
        for number, line in enumerate(first):
            ranks = [each.lines[number] if number < len(each.lines) else None for each in self.recordings]
            other = next((each for each in ranks if each is None or _form(each) != _form(line)), line)
            if other is not line:
                runs = "nothing" if other is None else other.op.removeprefix("aten.")
                raise WrongLine(line.source, f"one rank runs {line.op.removeprefix('aten.')} here, and another one {runs}")
            found = self._difference([each for each in ranks if each is not None], makers)
            if found is not None:
                out[number] = found
        longest = max(self.recordings, key=lambda each: len(each.lines)).lines
        if len(longest) > len(first):
            raise WrongLine(longest[len(first)].source, "one rank runs this, and another one does not")
        return out

    def _difference(self, ranks: Sequence[RecordedLine], makers: Mapping[int, tuple[RecordedLine, int]]) -> RankDifference | None:
        line = ranks[0]
        columns = list(zip(*(rank.operands for rank in ranks), strict=True))
        operands = {i: self._part([made.name for made in each], makers) for i, each in enumerate(columns) if len(set(each)) > 1}
        numbers = [{k: repr(each) for k, each in rank.arguments.items() if "TensorName" not in repr(each)} for rank in ranks]
        if all(each == numbers[0] for each in numbers):
            return RankDifference(operands) if operands else None
        if line.op == "aten.slice" and not operands:
            dim = int(line.arguments["dim"]) % len(line.operands[0].shape)
            size = line.results[0].shape[dim]
            if [int(each.arguments["start"] or 0) for each in ranks] == [each * size for each in self.coordinates]:
                return RankDifference({}, Cut(dim, size))
        return RankDifference(operands, VARYING)

    def _part(self, names: Sequence[int], makers: Mapping[int, tuple[RecordedLine, int]]) -> Kind:
        """The cut of a tensor of which each rank takes the part of its coordinate."""
        found = [makers.get(name) for name in names]
        line = found[0][0] if found[0] is not None else None
        parts = [each[1] for each in found if each is not None and each[0] is line]
        if line is None or line.op not in _PARTS or parts != list(self.coordinates):
            return VARYING
        dim = int(line.arguments.get("dim", 0)) % len(line.results[0].shape)
        return Cut(dim, line.results[0].shape[dim])


def _form(line: RecordedLine) -> tuple[Any, ...]:
    return line.op, line.axes, *(tuple((x.shape, x.dtype) for x in side) for side in (line.operands, line.results))
