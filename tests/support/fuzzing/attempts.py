"""Runs what is given anything at all: an AutoparError of one line or a result, and never for long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from autopar.errors import AutoparError

LONGEST_SECONDS = 2.0


def attempt(action: Callable[[], Any], most_seconds: float = LONGEST_SECONDS) -> bool:
    """Whether the action ends without an error. Any error but an AutoparError of one line passes through."""
    start = time.process_time()
    try:
        action()
        fine = True
    except AutoparError as error:
        assert "\n" not in str(error) and str(error).strip() and len(str(error)) < 5000, error
        fine = False
    seconds = time.process_time() - start
    assert seconds < most_seconds, f"{seconds:.1f} s"
    return fine


def examples(count: int) -> settings:
    """So many examples, the same in every run."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


def check_seeds(count: int, check: Callable[[random.Random], None]) -> None:
    """So many seeds; an error names its own."""
    for number in range(count):
        try:
            check(random.Random(number))
        except BaseException as error:
            raise AssertionError(f"number {number}") from error
