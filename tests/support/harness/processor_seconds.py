"""What a piece of work takes of the processor, whatever else the machine and the tests before it do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import process_time


def processor_seconds(work: Callable[[], object], times: int = 1) -> float:
    """The least of so many turns. What other tests left is not searched for garbage meanwhile."""
    gc.collect()
    gc.freeze()
    try:
        return min(_once(work) for _ in range(times))
    finally:
        gc.unfreeze()


def _once(work: Callable[[], object]) -> float:
    began = process_time()
    work()
    return process_time() - began
