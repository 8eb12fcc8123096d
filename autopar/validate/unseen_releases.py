"""Runs of releases that no constant has seen, by release and kind: how well prices hold for software that is newer than the fits.

The table is ``data/later_releases.csv`` (its source is in ``data/published_train.source.txt``). It is never fitted on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median

from autopar.validate.configuration import release_of
from autopar.validate.price import PricedRow
from autopar.validate.summary import percentile


def unseen_table() -> Path:
    """The path of the table of later releases."""
    return Path(str(files("autopar.validate") / "data" / "later_releases.csv"))


@dataclass(frozen=True, slots=True)
class UnseenErrors:
    """Errors of the runs of one `kind`, as shares: of their size, and the median with its sign (above 0: priced too slow)."""

    kind: str
    rows: int
    median: float
    p90: float
    signed: float


def unseen_errors(priced: Iterable[PricedRow]) -> list[UnseenErrors]:
    """The errors of dense models and of mixtures: of all, then of each device, then of each release."""
    groups: dict[tuple[int, str], list[float]] = {}
    for each in priced:
        if each.error is None:
            continue
        kind = "dense" if each.row.n_experts is None else "mixtures"
        names = (kind, f"{kind} on {each.row.gpu}", f"{kind} of release {release_of(each.row)}")
        for order, name in enumerate(names):
            groups.setdefault((order, name), []).append(each.error)
    return [_errors(name, errors) for (_, name), errors in sorted(groups.items())]


def _errors(kind: str, errors: list[float]) -> UnseenErrors:
    sizes = [abs(error) for error in errors]
    return UnseenErrors(kind, len(errors), median(sizes), percentile(sizes, 0.9) or 0.0, median(errors))
