"""What the user asks of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.plan import Precision
from autopar.rules.registry import Registry


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """`batch` is the global batch (0: the captured one). `force` fixes degrees: dp, tp, tp2, zero. `pins` fixes placements on the
    model axes of named values, as text (``I``, ``S(1) R``). `registry` holds rules that a user added. `relative_gap` is that
    of each ILP; a candidate that could be better than the best plan by less than `worth` (relative) is not looked at, nor by
    less than `worth_large` where that takes long."""

    batch: int = 0
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    force: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False
    time_limit_seconds: float = 60.0
    pins: Mapping[str, str] = field(default_factory=dict)
    registry: Registry | None = None
    relative_gap: float = 1e-4
    worth: float = 1e-3
    worth_large: float = 0.05

    @property
    def zeros(self) -> tuple[int, ...]:
        """The state shardings that may be chosen."""
        return (self.force["zero"],) if "zero" in self.force else (0, 1, 2, 3)
