"""Expert load: how unevenly routers distribute tokens over experts (busiest rank over the mean)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import ClusterError
from autopar.files import read_json

LARGEST = 1e18


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of experts. `factor`: tokens of the busiest rank over the mean, for every expert parallelism (1: balanced, as
    auxiliary losses aim at). `shares`: measured tokens of each expert (`parallel.expert_load()` counts them), for layers with as
    many experts; they give the factor of each expert parallelism."""

    factor: float = 1.0
    shares: tuple[float, ...] = ()

    def imbalance(self, experts: int, ranks: int) -> float:
        """Return the largest load over the mean, at least 1, of `ranks` that hold consecutive, equal ranges of `experts`."""
        if ranks == 1:
            return 1.0
        if len(self.shares) != experts or experts % ranks or not sum(self.shares):
            return self.factor
        per_rank = experts // ranks
        return max(sum(self.shares[first : first + per_rank]) for first in range(0, experts, per_rank)) * ranks / sum(self.shares)

    @staticmethod
    def parse(text: str) -> ExpertLoad:
        """Parse ``1.3``, or the path of a JSON list of tokens of each expert. ClusterError on anything else."""
        if text.endswith(".json"):
            return parse_expert_load(dict(shares=read_json(text, ClusterError, "the load of experts")), text)
        try:
            return parse_expert_load(dict(factor=float(text)), "expert load")
        except ValueError:
            raise ClusterError(f"expert load {text!r}: write a factor such as 1.3, or the path of a JSON list") from None


def parse_expert_load(data: Any, where: str) -> ExpertLoad:
    """Read a load from ``{factor: 1.3}`` or ``{shares: [...]}``."""
    entries = data if isinstance(data, dict) else {}
    factor, shares = entries.get("factor", 1.0), entries.get("shares", ())
    fine = isinstance(shares, (list, tuple)) and all(isinstance(each, (int, float)) and 0 <= each <= LARGEST for each in shares)
    fine = fine and isinstance(factor, (int, float)) and 1 <= factor <= LARGEST
    if not fine or set(entries) - {"factor", "shares"}:
        raise ClusterError(f"{where}: write a factor of at least 1, or shares, a list of numbers that are not negative")
    return ExpertLoad(float(factor), tuple(map(float, shares)))
