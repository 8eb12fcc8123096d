"""The options of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.placement import Placement, Placements
from autopar.ir.plan import Precision
from autopar.rules.registry import Registry
from autopar.solve.problem.pins import Constraints


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a search. `batch` is the global batch (0: the captured one). `force` fixes degrees (see `force`),
    `schedule` that of pipelines. `pins` fixes placements of named values by mesh axis, as text (``{"lm_head": {"tp": "R"}}``,
    see `problem.pins`); `stored` those of parameters, by their names in the model, where another program has the same weights;
    `placed` those of inputs and results of the graph, by their names in it and mesh axis. `registry` holds rules that a user
    added. `relative_gap` is that of each ILP. A candidate is pruned whose lower bound is not below the best plan by at least
    `min_improvement` (relative), or `min_improvement_large` where its problem is large. A lower bound within `sharp_gap` of the
    best plan is not sharpened. Plans whose steps differ by at most `indifference` (relative) count as equally fast
    (`robust_choice`). `may_offload_optimizer`: where nothing fits, plans with the optimizer's state in host memory are searched
    (`offload_optimizer`). Problems that do not wait for each other are solved on so many `processes` at once, where the machine
    can fork."""

    batch: int = 0
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    force: Mapping[str, int] = field(default_factory=dict)
    schedule: str = ""
    strict: bool = False
    time_limit_seconds: float = 300.0
    pins: Constraints = field(default_factory=dict)
    stored: Mapping[str, Placements] = field(default_factory=dict)
    placed: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    registry: Registry | None = None
    relative_gap: float = 1e-4
    sharp_gap: float = 0.01
    min_improvement: float = 1e-3
    min_improvement_large: float = 0.05
    indifference: float = 0.02
    processes: int = 1
    may_offload_optimizer: bool = True

    @property
    def zeros(self) -> tuple[int, ...]:
        """The state shardings (ZeRO stages) that may be chosen."""
        return (self.force["zero"],) if "zero" in self.force else (0, 1, 2, 3)
