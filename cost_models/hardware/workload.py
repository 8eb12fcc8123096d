"""Facts on the tokens of a workload: lengths of documents in packed sequences (how many keys a token sees, where
attention is within documents), and how unevenly routers distribute tokens over experts (busiest rank over the mean)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import ClusterError
from autopar.files import read_json

LARGEST = 1e18


@dataclass(frozen=True, slots=True)
class DocumentLengths:
    """The documents of a workload. `tokens`: the mean, over tokens, of the length of a token's document, ``sum L^2 / sum L``
    (0: unknown, every sequence is one document). Attention takes ``2 tokens (d + e)`` FLOPs a query without a causal mask."""

    tokens: float = 0.0

    @staticmethod
    def of(lengths: Iterable[tuple[float, float]]) -> DocumentLengths:
        """Return the documents of pairs (length, count). ClusterError where there are none."""
        pairs = list(lengths)
        total = sum(length * count for length, count in pairs)
        if not pairs or not 0 < total <= LARGEST or any(length <= 0 or count < 0 for length, count in pairs):
            raise ClusterError("document lengths: write lengths above 0 of at least one document")
        return DocumentLengths(sum(length**2 * count for length, count in pairs) / total)

    @staticmethod
    def parse(given: Any) -> DocumentLengths:
        """Read a length of all documents (``512``), a list of lengths, a histogram ``{length: count}``, or the path of a JSON
        file with one of these. ClusterError on anything else."""
        if isinstance(given, str) and given.endswith(".json"):
            return DocumentLengths.parse(read_json(given, ClusterError, "the lengths of documents"))
        try:
            if isinstance(given, Mapping):
                return DocumentLengths.of((float(length), float(count)) for length, count in given.items())
            if isinstance(given, (list, tuple)):
                return DocumentLengths.of((float(length), 1.0) for length in given)
            return DocumentLengths.of([(float(given), 1.0)])
        except (TypeError, ValueError, OverflowError):
            raise ClusterError(
                f"document lengths {str(given)[:60]!r}: write a number of tokens such as 512, a list of lengths, a histogram "
                "{length: count}, or the path of a JSON file with one of these"
            ) from None


def parse_document_lengths(data: Any, where: str) -> DocumentLengths:
    """Read lengths from ``{tokens: 512}``, as a plan has them."""
    tokens = data.get("tokens", 0.0) if isinstance(data, dict) and not set(data) - {"tokens"} else -1
    if not isinstance(tokens, (int, float)) or not 0 <= tokens <= LARGEST:
        raise ClusterError(f"{where}: write tokens, a number of at least 0")
    return DocumentLengths(float(tokens))


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
