"""The result of proving a block: its lines, collectives, lemmas and assumptions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from autopar.checker.reader import Applied, PlacedTensor


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a block, in the order of the text: axis, conversion, local shape and dtype of what it takes."""

    line: int
    axis: str
    text: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool


@dataclass(frozen=True, slots=True)
class Line:
    """An operation of a block as it runs on a rank, and what it makes."""

    applied: Applied
    results: tuple[PlacedTensor, ...]
    gradients: bool


@dataclass(slots=True)
class BlockResult:
    """The kinds that a block returns, and the foundations of its proof."""

    outputs: tuple[PlacedTensor, ...] = ()
    lemmas: Counter[str] = field(default_factory=Counter)
    """The number of lines that rest on each lemma or row, by its name."""
    assumptions: dict[int, str] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    inputs: tuple[PlacedTensor, ...] = ()
    parameters: tuple[PlacedTensor, ...] = ()
    lines: list[Line] = field(default_factory=list)
    elsewhere: list[PlacedTensor] = field(default_factory=list)
    """The values that are saved on the host, or in parts on the ranks of an axis."""
