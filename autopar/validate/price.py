"""Prices rows with the planner's own code path: capture, forced placements, evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.stacks import with_stack
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.rules.priced import priced_registry
from autopar.solve.forced import Placed, forced, place
from autopar.validate.architectures import architecture_of
from autopar.validate.configuration import FLOAT8, assumed_of, cluster_of, forced_of, given, layer_share, sends_once
from autopar.validate.graphs import AGAIN, Manner, graph_of, with_marked_layers
from autopar.validate.rows import Row

Constants = Mapping[str, float] | None
Stack = Callable[[Cluster, Row, Constants], Cluster]


def stack_of(cluster: Cluster, row: Row, constants: Constants) -> Cluster:
    """The cluster as the row's software uses it: its constants (None: those of ``stacks.yaml``), and what this run hides."""
    return with_stack(
        cluster,
        row.software_stack,
        compiled=row.compiled == 1,
        async_tp=None if row.async_tp is None else bool(row.async_tp),
        ep_overlap=None if row.ep_overlap is None else bool(row.ep_overlap),
        constants=constants,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """What of a row does not depend on constants: the graph at its batch, the candidate, and the bare cluster."""

    graph: Graph
    candidate: Candidate
    cluster: Cluster
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Priced:
    """A row with its prediction; `skipped` is the reason where there is none, `assumed` what the source does not state."""

    row: Row
    evaluation: Evaluation | None
    skipped: str = ""
    assumed: tuple[str, ...] = ()
    candidate: Candidate | None = None
    cluster: Cluster | None = None

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1`` of the step."""
        if self.evaluation is None or not self.row.step_seconds:
            return None
        return self.evaluation.step_seconds / self.row.step_seconds - 1


@dataclass(slots=True)
class Session:
    """Keeps what rows share, and what does not depend on constants; price as often as you like."""

    stack: Stack = stack_of
    _settings: dict[Row, Setting | str] = field(default_factory=dict)
    _placed: dict[object, Placed] = field(default_factory=dict)

    def setting(self, row: Row) -> Setting:
        """Raises AutoparError with the reason where the row cannot be expressed."""
        if row not in self._settings:
            try:
                self._settings[row] = self._make(row)
            except AutoparError as error:
                self._settings[row] = str(error)
        found = self._settings[row]
        if isinstance(found, str):
            raise AutoparError(found)
        return found

    def _make(self, row: Row) -> Setting:
        architecture, cluster, wanted = architecture_of(row), cluster_of(row), forced_of(row)
        float8, context = row.precision in FLOAT8, row.cp or 1
        manner = Manner(float8, float8 and wanted.recompute == "products", context, row.ep or 1, sends_once(row))
        graph = graph_of(architecture, given(row, "layers"), wanted.precision.compute, manner)
        graph = replace(graph, batch=given(row, "global_batch") * context)
        share = layer_share(row)
        if share is not None:
            graph = with_marked_layers(graph, share)
            marked = tuple(block.name for block in graph.blocks if block.name.endswith(AGAIN))
            wanted = replace(wanted, recomputed_blocks=marked, recompute=wanted.recompute if marked else "none")
        key = (
            *(tuple(block.name for block in graph.blocks), architecture, manner),
            *(wanted.sliced_experts, wanted.precision.compute, wanted.tp, wanted.sequence_parallel),
        )
        if key not in self._placed:
            self._placed[key] = place(graph, wanted, priced_registry())
        return Setting(graph, forced(graph, cluster, wanted, self._placed[key]), cluster, assumed_of(row))

    def price(self, rows: Iterable[Row], constants: Constants = None) -> tuple[Priced, ...]:
        """Every row, in order."""
        return tuple(self._price(row, constants) for row in rows)

    def _price(self, row: Row, constants: Constants) -> Priced:
        try:
            setting = self.setting(row)
            cluster = self.stack(setting.cluster, row, constants)
            found = evaluate(setting.graph, setting.candidate, cluster, "adamw")
            return Priced(row, found, "", setting.assumed, setting.candidate, cluster)
        except AutoparError as error:
            return Priced(row, None, str(error))
        except Exception as error:  # noqa: BLE001  one row's numbers must not take the prices of all others away
            return Priced(row, None, f"unforeseen: {type(error).__name__}: {' '.join(str(error).split())[:100]}")


def price_rows(rows: Iterable[Row], constants: Constants = None, session: Session | None = None) -> tuple[Priced, ...]:
    """Every row with its prediction, or with the reason why there is none. A `session` keeps captures and placements."""
    return (session or Session()).price(rows, constants)
