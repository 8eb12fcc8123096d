"""Collectives that run in parts behind the computing beside them (asynchronous tensor parallelism, ring attention).

A product whose operand is gathered starts on the part that is there; a product whose result is reduced hands on parts as they
are ready (Wang et al., ASPLOS 2023, "Overlap communication with dependent computation via decomposition"). Of ``p`` parts the
first or the last has nothing to hide behind, so at most ``1 - 1/p`` of a collective is hidden, and no more than the computing
next to it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

Piece = tuple[float, frozenset[str], float]
"""Seconds of the main stream, the links it uses meanwhile, and which share of it may hide behind what is next to it."""


def exposed(stream: Sequence[Piece]) -> list[tuple[float, frozenset[str]]]:
    """What the main stream still waits for: the first neighbour hides first, and computing hides no more than it takes."""
    spare = [0.0 if links else seconds for seconds, links, _ in stream]
    out = []
    for index, (seconds, links, share) in enumerate(stream):
        hidden = 0.0
        for beside in (index - 1, index + 1) if share else ():
            if 0 <= beside < len(stream):
                more = min(seconds * share - hidden, spare[beside])
                spare[beside] -= more
                hidden += more
        out.append((seconds - hidden, links))
    return [(seconds, links) for seconds, links in out if seconds > 0]
