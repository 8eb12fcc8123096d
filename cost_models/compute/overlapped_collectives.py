"""Exposed time of collectives that overlap with compute: those that are decomposed to overlap with the products beside them
(asynchronous tensor parallelism), those inside of an operation that computes on one block while the next is sent (ring
attention), and those of a backward that run beside gradients of weights, which nothing waits for.

A product whose operand is gathered starts on the shards that have arrived; a product whose result is reduced sends its shards as
they are ready (Wang et al., ASPLOS 2023, "Overlap communication with dependent computation via decomposition"). Of ``p`` shards
the first or the last has no compute to overlap with, so at most ``1 - 1/p`` of a collective is hidden, and no more than the
compute beside it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Block
from autopar.operations.table import operation

WEIGHT_GRADIENT_SHARE = 0.5
"""The share of a linear's backward that is the gradient of its weight (Qi et al., arXiv 2401.10241, section 2)."""

StreamSegment = tuple[float, frozenset[str], float]
"""Seconds of the main stream, the links that it uses meanwhile (none: compute), and the share of it that may overlap with
compute."""


def weight_gradient_nodes(block: Block) -> frozenset[str]:
    """Return the linears whose weight trains: the gradient of the weight may be computed later than that of the input."""
    trained = {parameter.value.name for parameter in block.parameters if parameter.trainable and not parameter.buffer}
    linears = [node for node in block.nodes if operation(node.op).splits_backward and len(node.operands()) > 1]
    return frozenset(node.name for node in linears if node.operands()[1] in trained)


def exposed_blocks(seconds: float, compute_seconds: float, blocks: int) -> float:
    """Return the exposed seconds of a collective of so many blocks inside of an operation: all but the first one hide behind its
    compute."""
    return max(0.0, seconds - compute_seconds * (blocks - 1) / blocks)


def exposed_segments(stream: Sequence[StreamSegment]) -> list[tuple[float, frozenset[str]]]:
    """The main stream without what overlaps."""
    exposed = exposed_seconds(stream)
    return [(seconds, links) for seconds, (_, links, _) in zip(exposed, stream, strict=True) if seconds > 0]


def exposed_seconds(stream: Sequence[StreamSegment]) -> list[float]:
    """Return what is left of each segment: a collective overlaps with the compute before it, then with the compute after it;
    compute hides no more than it takes."""
    unused_compute = [0.0 if links else seconds for seconds, links, _ in stream]
    out = []
    for index, (seconds, _, share) in enumerate(stream):
        hidden = 0.0
        for beside in (index - 1, index + 1) if share else ():
            if 0 <= beside < len(stream):
                more = min(seconds * share - hidden, unused_compute[beside])
                unused_compute[beside] -= more
                hidden += more
        out.append(seconds - hidden)
    return out
