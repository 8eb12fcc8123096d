"""What a plan sends: the collectives of one call of a block; and how Megatron cuts a Llama layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.rules.conversions import axis_conversion, changed_axis


def collectives_of_call(graph: Graph, candidate: Candidate, block: str, axis: int) -> tuple[Counter[str], Counter[str]]:
    """The collectives of one call of a block on an axis, without those of parameters: forward, backward."""
    found = graph.block(block)
    values = found.values()
    parameters = {parameter.value.name for parameter in found.parameters}
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for arc in candidate.block(block).conversions:
        if arc.value in parameters or changed_axis(arc.source, arc.target) != axis:
            continue
        how = axis_conversion(arc.source[axis], arc.target[axis], values[arc.value].differentiable)
        assert how is not None
        for side, kind in ((forward, how.forward), (backward, how.backward)):
            if kind is not None and kind not in ("slice", "pad", "mask", "scale"):
                side[kind] += 1
    return forward, backward


MEGATRON_LLAMA: Mapping[str, str] = {
    "q_proj": "n", "k_proj": "n", "v_proj": "n", "o_proj": "k", "gate_proj": "n", "up_proj": "n", "down_proj": "k",
}  # fmt: skip
