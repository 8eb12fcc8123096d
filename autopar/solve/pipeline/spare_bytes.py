"""How much memory a pipeline's stages can leave free at most: the dynamic program over bytes in place of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy

from autopar.solve.pipeline.stage_partition import Matrix, best_partition
from autopar.solve.pipeline.stage_tables import RangeOptions


def spare_bytes(ranges: Sequence[tuple[RangeOptions, float, float]], allowed: Matrix, virtual: int) -> float | None:
    """What the fullest stage leaves free at most, by estimate; negative where no partition fits. `ranges` has for each chunk its
    options, the micro-batches in flight and the usable bytes of its device. None where the calls cannot be cut so often."""
    most = max(usable for _, _, usable in ranges)
    known: dict[tuple[int, float, float], Matrix] = {}
    for options, count, usable in ranges:
        key = id(options), count, usable
        if key not in known:
            held = virtual * (options.state_bytes + count * options.saved_bytes) + options.running_bytes
            known[key] = numpy.where(allowed, held.min(axis=0) + (most - usable), numpy.inf)
    loads = [known[id(options), count, usable] for options, count, usable in ranges]
    cut = best_partition(loads, [numpy.zeros_like(load) for load in loads], 0.0, limits=1)
    if cut is None:
        return None
    fullest = max(float(load[first, end]) for load, (first, end) in zip(loads, pairwise(cut.edges), strict=True))
    return most - fullest
