"""Measured collectives of one link level: seconds by message size, linear between the sizes that were measured.

A latency and a bandwidth (alpha-beta) do not describe all that libraries do: on CPU ranks a buffer above the C library's mmap
threshold (32 MiB at most in glibc) is new memory each time, whose pages the kernel has to map, so that seconds are convex in
bytes. comm/collectives.py prices with these tables, and with alpha-beta where there is none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "point_to_point")
STATE_KINDS = {"parameter_gather": "all_gather", "gradient_scatter": "reduce_scatter"}
"""FSDP2's collectives of parameters and gradients: those of the second name with the copies between tensors and flat buffers.
Where calibration has not measured them, they cost what the plain collective does (on GPUs the copies run at memory bandwidth)."""


_ROUNDED = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class PiecewiseLinear:
    """A function of seconds by bytes. `sizes` ascend, `seconds` do not fall; at least two points. Beyond the last point with the
    slope of the last segment, below the first one its seconds."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(points: Iterable[tuple[float, float]]) -> PiecewiseLinear:
        """Make a table from pairs of bytes and seconds in any order."""
        ordered = sorted(points)
        return PiecewiseLinear(tuple(size for size, _ in ordered), tuple(seconds for _, seconds in ordered))

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        return tuple(zip(self.sizes, self.seconds, strict=True))

    def at(self, size: float) -> float:
        """Return the seconds of `size` bytes."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        after = min(bisect_right(sizes, size), len(sizes) - 1)
        before = after - 1
        slope = (seconds[after] - seconds[before]) / (sizes[after] - sizes[before])
        return seconds[before] + (size - sizes[before]) * slope

    def without_diseconomies(self) -> PiecewiseLinear:
        """Return the largest table below this one whose seconds per byte do not rise with the bytes, so that ``g(k x) <= k g(x)``
        for all k >= 1: what k parts of a message cost together, at least. Where the seconds per byte rise, it goes on along the
        ray through the origin, until this table falls below the ray."""
        out: list[tuple[float, float]] = []
        rate = inf  # the least seconds per byte so far
        for (left, low), (right, high) in pairwise((*self.points, (0.0, 0.0))):
            if left:
                rate = min(rate, low / left)
            above = left > 0 and low > rate * left * _ROUNDED
            out.append((left, rate * left if above else low))
            if above and right and high < rate * right:
                slope = (high - low) / (right - left)
                meeting = (low - slope * left) / (rate - slope)
                out.append((meeting, rate * meeting))
        return PiecewiseLinear.of([*out, *self._beyond(rate)])

    def _beyond(self, rate: float) -> tuple[tuple[float, float], ...]:
        """Return points that make the envelope go on rightly: along the ray, or along the table where that falls below it."""
        size, seconds = self.sizes[-1], self.seconds[-1]
        slope = (self.at(2 * size) - seconds) / size
        if slope >= rate:
            return ((2 * size, 2 * size * rate),)
        if seconds <= rate * size * _ROUNDED:
            return ()
        meeting = (seconds - slope * size) / (rate - slope)
        return (meeting, rate * meeting), (2 * meeting, self.at(2 * meeting))


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """Seconds of one kind (of `KINDS` or `STATE_KINDS`) among `width` neighbours on a level, by the bytes of the whole tensor.
    `for_bounds`: priced `PiecewiseLinear.without_diseconomies`; not of a file."""

    kind: str
    width: int
    table: PiecewiseLinear
    for_bounds: bool = False


def rising(points: Iterable[tuple[float, float]]) -> PiecewiseLinear:
    """Return the table with the least squared distance from measurements whose seconds do not fall (isotonic regression:
    neighbours that fall are averaged)."""
    groups: list[tuple[float, list[float]]] = []
    for size, seconds in sorted(points):
        groups.append((seconds, [size]))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (low, left), (high, right) = groups[-2:]
            mean = (low * len(left) + high * len(right)) / (len(left) + len(right))
            groups[-2:] = [(mean, left + right)]
    return PiecewiseLinear.of((size, seconds) for seconds, sizes in groups for size in sizes)
