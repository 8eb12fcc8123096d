"""Fits the constants of a software stack on one device generation (``software_stacks.yaml``) to published runs; and the errors of
software that no constant has seen: each published run priced with constants that were fitted without its source, and runs of
later releases, by release and kind (``data/later_releases.csv``, which is never fitted on; its source is in
``data/published_train.source.txt``).

A step is near to linear in the reciprocals of the constants (work over rate, and what of it is hidden), so each run is replaced
by its tangent: four evaluations. The fit on the tangents is repeated near where it ends. Tangents are taken at points of a coarse
grid, which the fits with and without a source share for the most part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import log
from pathlib import Path
from statistics import median

from autopar.cost_models.calibrate.fit import descend
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError
from autopar.validate.configuration import release_of
from autopar.validate.price import PricedRow, RowSetup, Session, stack_of
from autopar.validate.rows import Row
from autopar.validate.summary import percentile

Item = tuple[Row, RowSetup]
Constants = Mapping[str, float]

USUAL = {"matmul": 0.62, "memory": 0.6, "attention": 0.4, "network": 0.9}
"""The constants at which each fit begins, and towards which a stack with few runs is pulled."""

PULL = 0.01
MAX_ERROR = 0.4
"""Largest absolute logarithm that one run contributes: a run that is off by more has another cause than a constant."""

MOST = {"memory": 0.95, "attention": 0.75, "network": 1.0}
"""Streaming kernels reach about 0.92 of the sheet's bandwidth (babelstream on A100 and H100), FlashAttention-3 0.75 of the peak
(arXiv 2407.08608, abstract). Products: `Device.measured_peak`."""

FAMILIES = {"megatron-core-moe": "megatron-core", "megatron-lm-2021": "megatron-lm", "megatron-lm-2022": "megatron-lm"}
"""Stacks of one code, which have few runs each and are fitted together."""

FEWEST = 4
"""Runs of a fit: more than it has constants."""

ROWS_OF_SOURCE = 12
"""The number of runs of a source that are used, evenly picked: every source weighs the same anyway."""

_LEAST = 0.05
_REACH = 1.6
_GRID = 1.3
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Tangent:
    """``seconds = base + sum(slope / constant)`` near the constants where it was taken; `source` and measured seconds of the
    run."""

    source: str
    measured: float
    base: float
    slopes: tuple[float, ...]

    def error(self, reciprocals: Sequence[float]) -> float:
        """Logarithm of predicted over measured."""
        found = self.base + sum(slope * each for slope, each in zip(self.slopes, reciprocals, strict=True))
        return log(max(found, 1e-3 * self.measured) / self.measured)


def constant_names(items: Iterable[Item]) -> tuple[str, ...]:
    """The constants of a stack: attention has one where it is one kernel (flash attention), else the network has one."""
    flash = any(row.attention != "naive" for row, _ in items)
    return ("matmul", "memory", "attention") if flash else ("matmul", "memory", "network")


def largest(name: str, device: Device) -> float:
    """The physical limit of a constant."""
    if name != "matmul":
        return MOST[name]
    shares = [rate / device.peak_flops_per_second(dtype) for dtype, rate in device.measured_peak]
    return max(shares, default=1.0)


def step_seconds(item: Item, constants: Constants) -> float:
    """The predicted step."""
    row, setup = item
    return evaluate(setup.graph, setup.candidate, stack_of(setup.cluster, row, constants), "adamw").step_seconds


def tangent(item: Item, at: Constants) -> Tangent:
    """The run near the constants `at`."""
    whole = step_seconds(item, at)
    slopes = []
    for name, value in at.items():
        lower = value / 1.1
        slopes.append((step_seconds(item, {**at, name: lower}) - whole) / (1 / lower - 1 / value))
    base = whole - sum(slope / value for slope, value in zip(slopes, at.values(), strict=True))
    return Tangent(item[0].source, item[0].step_seconds or 1.0, base, tuple(slopes))


def loss(runs: Sequence[Tangent], constants: Constants) -> float:
    """Mean over sources of the mean absolute logarithm of predicted over measured, and the pull."""
    many = Counter(run.source for run in runs)
    reciprocals = [1 / value for value in constants.values()]
    off = sum(min(abs(run.error(reciprocals)), MAX_ERROR) / many[run.source] for run in runs) / max(1, len(many))
    return off + PULL * sum(log(value / USUAL[name]) ** 2 for name, value in constants.items())


def picked(items: Iterable[Item]) -> list[Item]:
    """Return at most `ROWS_OF_SOURCE` runs of each source."""
    sources: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        sources[item[0].source].append(item)
    return [item for each in sources.values() for item in each[:: -(-len(each) // ROWS_OF_SOURCE)]]


@dataclass(slots=True)
class Fitter:
    """Fits constants to `items`, which are runs on one device generation, or to those of some sources. `given` constants are
    held."""

    items: Sequence[Item]
    names: Sequence[str] = ()
    given: Constants = field(default_factory=dict)
    _known: dict[tuple[int, tuple[float, ...]], Tangent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = self.names or constant_names(self.items)
        self.items = picked(self.items)

    @property
    def device(self) -> Device:
        return self.items[0][1].cluster.device

    def fit(self, without: Container[str] = ()) -> dict[str, float] | None:
        """The constants, of nothing but the sources that are not left out. None where these have too few runs. Of the rounds that
        one is taken at whose end the runs themselves, not their tangents, err least: at a cap of the rates a tangent misleads."""
        chosen = [index for index, (row, _) in enumerate(self.items) if row.source not in without]
        if len(chosen) < FEWEST:
            return None
        at = {name: min(self.given.get(name, USUAL[name]), largest(name, self.device)) for name in self.names}
        ends: list[dict[str, float]] = []
        for _ in range(_ROUNDS):
            near = {name: at[name] if name in self.given else self._on_grid(name, at[name]) for name in at}
            runs = [self._tangent(index, near) for index in chosen]
            at = descend(lambda tried, runs=runs: loss(runs, tried), near, self._bounds(near))  # type: ignore[misc]
            ends.append(at)
        return min(ends, key=lambda end: loss([self._run(index, end) for index in chosen], end))

    def _on_grid(self, name: str, value: float) -> float:
        nearest = USUAL[name] * _GRID ** round(log(value / USUAL[name]) / log(_GRID))
        return min(nearest, largest(name, self.device))

    def _bounds(self, near: Constants) -> dict[str, tuple[float, float]]:
        most = {name: min(largest(name, self.device), value * _REACH) for name, value in near.items()}
        return {n: (v, v) if n in self.given else (max(_LEAST, v / _REACH), most[n]) for n, v in near.items()}

    def _run(self, index: int, at: Constants) -> Tangent:
        """A run with its price under `at`."""
        row, _ = self.items[index]
        return Tangent(row.source, row.step_seconds or 1.0, step_seconds(self.items[index], at), (0.0,) * len(at))

    def _tangent(self, index: int, near: Constants) -> Tangent:
        key = index, tuple(near.values())
        if key not in self._known:
            self._known[key] = tangent(self.items[index], near)
        return self._known[key]


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
