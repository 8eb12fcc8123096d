"""Prices published runs as the planner prices its plans: capture, the placements of a fixed configuration, the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.cost_models.hardware.stack_entries import other_constants
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.software.pricer import Pricer
from autopar.solve.fixed.candidate import BlockPlacements
from autopar.validate.configuration import FLOAT8, assumed_of, configuration_of, uses_cuda_graphs, workload_of
from autopar.validate.rows import Row

Constants = Mapping[str, float] | None
Stack = Callable[[Cluster, Row, Constants], Cluster]


def stack_of(cluster: Cluster, row: Row, constants: Constants) -> Cluster:
    """The cluster with the constants of the row's software (None: ``software_stacks.yaml``), and what that software overlaps.
    Beside float8 weights the master weights are whole."""
    found = with_stack(
        cluster,
        row.software_stack,
        compiled=row.compiled == 1,
        async_tp=None if row.async_tp is None else bool(row.async_tp),
        ep_overlap=None if row.ep_overlap is None else bool(row.ep_overlap),
        constants=constants,
        graphs=uses_cuda_graphs(row),
    )
    if row.precision not in FLOAT8:
        return found
    return replace(found, state_layout=replace(found.state_layout, master_remainders=False))


@dataclass(frozen=True, slots=True)
class RowSetup:
    """The part of a row that does not depend on constants: the graph of the row at its batch, the candidate, and the cluster of
    the data sheets."""

    graph: Graph
    candidate: Candidate
    cluster: Cluster
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PricedRow:
    """A row with its predicted cost. `skipped` is the reason why there is none, `assumed` what the source does not state."""

    row: Row
    evaluation: Evaluation | None
    skipped: str = ""
    assumed: tuple[str, ...] = ()
    candidate: Candidate | None = None
    cluster: Cluster | None = None

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1`` of the step time."""
        if self.evaluation is None or not self.row.step_seconds:
            return None
        return self.evaluation.step_seconds / self.row.step_seconds - 1


@dataclass(slots=True)
class Session:
    """Caches what rows share and what does not depend on constants, so that a table is priced again in little time."""

    stack: Stack = stack_of
    _setups: dict[Row, RowSetup | str] = field(default_factory=dict)
    _placed: dict[object, dict[object, BlockPlacements]] = field(default_factory=dict)

    def setup(self, row: Row) -> RowSetup:
        """The setup of a row. AutoparError with the reason where the row cannot be expressed."""
        if row not in self._setups:
            try:
                self._setups[row] = self._make(row)
            except AutoparError as error:
                self._setups[row] = str(error)
        found = self._setups[row]
        if isinstance(found, str):
            raise AutoparError(found)
        return found

    def _make(self, row: Row) -> RowSetup:
        work, wanted = workload_of(row), configuration_of(row)
        alike = work.decoder, work.options, work.whole_experts, work.precision.compute
        graph, candidate = Pricer(work, _placed=self._placed.setdefault(alike, {})).candidate(wanted)
        return RowSetup(graph, candidate, work.cluster, assumed_of(row))

    def price(self, rows: Iterable[Row], constants: Constants = None) -> tuple[PricedRow, ...]:
        """The rows with their predicted cost, in order."""
        return tuple(self._price(row, constants) for row in rows)

    def _price(self, row: Row, constants: Constants) -> PricedRow:
        try:
            setting = self.setup(row)
            cluster = self.stack(setting.cluster, row, constants)
            found = evaluate(setting.graph, setting.candidate, cluster, "adamw")
            other = "" if constants else other_constants(row.software_stack, cluster.device.generation, row.compiled == 1)
            return PricedRow(
                row=row,
                evaluation=found,
                skipped="",
                assumed=(*setting.assumed, *filter(None, (other,))),
                candidate=setting.candidate,
                cluster=cluster,
            )
        except AutoparError as error:
            return PricedRow(row, None, str(error))
        except Exception as error:  # noqa: BLE001  the numbers of one row must not stop the pricing of all others
            return PricedRow(row, None, f"unforeseen: {type(error).__name__}: {' '.join(str(error).split())[:100]}")


def price_rows(rows: Iterable[Row], session: Session | None = None) -> tuple[PricedRow, ...]:
    """The rows with their predicted cost, or with the reason why there is none. A `session` caches captures and placements."""
    return (session or Session()).price(rows)
