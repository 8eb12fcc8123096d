"""Lengths of documents in packed sequences: how many keys a token sees, where attention is within documents."""

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
