"""How often Python searches for garbage in the processes of the tests.

Captures, tables and what tests keep for others make millions of objects that stay alive; searching them again and again at
Python's threshold of 700 allocations takes up to a tenth of a session. Tests of what is freed call ``gc.collect()``.
"""

from __future__ import annotations

import gc

_THRESHOLD = 100_000
"""Allocations until the next collection; `autopar.cli` has such a threshold too."""


def collect_seldom() -> None:
    """From now on, and never among what exists by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, *gc.get_threshold()[1:])
