"""How far off predictions are, from the published runs: what share of them would fit with such a prediction, and within which
interval steps lie. ``data/residuals.json`` is drawn from the table that planning does not read
(``python tests/benchmarks/store_measured_runs.py --residuals`` writes it, and a test compares)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

Residuals = Sequence[tuple[str, float]]
"""(source, ``measured / predicted - 1``) of runs."""
_OUTER = 0.1
"""The share of the weight that is left out on each side of an interval."""


@lru_cache(maxsize=1)
def stored_residuals() -> dict[str, Residuals]:
    """Residuals of ``memory``, and of steps of ``dense`` models and ``mixtures``."""
    text = (files("autopar.software") / "data" / "residuals.json").read_text(encoding="utf-8")
    return {kind: [(source, float(value)) for source, value in pairs] for kind, pairs in json.loads(text).items()}


def quantile(residuals: Residuals, share: float) -> float:
    """The least residual below which `share` of the weight lies; every source has the same weight, whatever its runs."""
    runs = Counter(source for source, _ in residuals)
    below = 0.0
    for source, residual in sorted(residuals, key=lambda pair: pair[1]):
        below += 1 / (runs[source] * len(runs))
        if below >= share:
            return residual
    return max((residual for _, residual in residuals), default=0.0)


def fitting_share(predicted_bytes: float, capacity_bytes: float) -> float:
    """The share of the runs that would fit, if they were predicted to take so much."""
    residuals = stored_residuals()["memory"]
    runs = Counter(source for source, _ in residuals)
    return sum(1 / (runs[source] * len(runs)) for source, each in residuals if predicted_bytes * (1 + each) <= capacity_bytes)


def step_interval(predicted_seconds: float, mixture: bool) -> tuple[float, float]:
    """The interval in which eight of ten measured steps lie."""
    residuals = stored_residuals()["mixtures" if mixture else "dense"]
    return tuple(predicted_seconds * (1 + quantile(residuals, share)) for share in (_OUTER, 1 - _OUTER))  # type: ignore[return-value]
