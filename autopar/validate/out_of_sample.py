"""The errors of software that no constant has seen: each published run priced with constants that were fitted without its source;
and runs of later releases, by release and kind (``data/later_releases.csv``, which is never fitted on; its source is in
``data/published_train.source.txt``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median

from autopar.errors import AutoparError
from autopar.validate.configuration import release_of
from autopar.validate.constants import FAMILIES, Fitter, Item, constant_names
from autopar.validate.price import PricedRow, Session
from autopar.validate.rows import Row
from autopar.validate.summary import percentile

Group = tuple[str, str]
"""A family of software stacks on a device generation."""


def grouped(session: Session, rows: Sequence[Row]) -> dict[Group, list[Item]]:
    """The rows that can be priced and have a time, by family and generation."""
    groups: dict[Group, list[Item]] = defaultdict(list)
    for row in rows:
        if not row.step_seconds:
            continue
        try:
            setup = session.setup(row)
        except AutoparError:
            continue
        family = FAMILIES.get(row.software_stack, row.software_stack)
        groups[family, setup.cluster.device.generation].append((row, setup))
    return dict(groups)


def leave_one_source_out(
    rows: Sequence[Row], session: Session | None = None, progress: Callable[[str], None] = lambda _: None
) -> tuple[PricedRow, ...]:
    """The rows, each priced with the constants of its stack as fitted on the other sources of that stack and generation. Where
    these have too few runs, all other stacks of the generation (with attention of the same kind) are the nearest; where there
    is none of these either, what ``software_stacks.yaml`` says. Memory does not depend on constants."""
    session = session or Session()
    groups = grouped(session, rows)
    pools: dict[object, Fitter] = {}
    priced = {each.row.id: each for each in session.price([row for row in rows if not row.step_seconds])}
    for group, items in groups.items():
        progress(f"{group[0]} on {group[1]}: {len(items)} runs")
        sources = dict.fromkeys(row.source for row, _ in items)
        fitter = Fitter(items)
        for source in sources:
            constants = fitter.fit({source})
            if constants is None:
                constants = _pool(groups, group, pools).fit(sources)
            for each in session.price([row for row, _ in items if row.source == source], constants):
                priced[each.row.id] = each
    rest = [row for row in rows if row.id not in priced]
    priced |= {each.row.id: each for each in session.price(rest)}
    return tuple(priced[row.id] for row in rows)


def _pool(groups: dict[Group, list[Item]], group: Group, pools: dict[object, Fitter]) -> Fitter:
    """Return the runs of all stacks of the generation whose attention is of the same kind."""
    names = constant_names(groups[group])
    if (group[1], names) not in pools:
        same = [each for (_, generation), each in groups.items() if generation == group[1] and constant_names(each) == names]
        pools[group[1], names] = Fitter([item for each in same for item in each], names)
    return pools[group[1], names]


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
