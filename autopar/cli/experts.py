"""Mixtures of experts in a plan: who holds them, and how many tokens each rank of them gets."""

from __future__ import annotations

from autopar.cost_models.expert_load import ExpertLoad, load
from autopar.ir import dims
from autopar.ir.graph import Node
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate
from autopar.ir.planfile import Plan

OPERATION = "ap.moe_experts"


def expert_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row for each distinct mixture: ``experts | DecoderLayer.mlp.experts: 8 on ep=4, 16,384 copies of tokens a rank ...``."""
    assumed = load(plan.document.cluster.description.get("expert_load", {}), "the plan")
    return [
        ("experts", f"{block.name}.{node.module or node.name}: {_dealt(plan.candidate, block.name, node, sizes, assumed)}")
        for block in plan.graph.blocks
        for sizes in [{name: value.shape for name, value in block.values().items()}]
        for node in block.nodes
        if node.op == OPERATION
    ]


def _dealt(candidate: Candidate, block: str, node: Node, shapes: dict[str, dims.Shape], assumed: ExpertLoad) -> str:
    at = next(each for each in candidate.block(block).nodes if each.node == node.name)
    tokens, matrices = at.operands[0], at.operands[3]
    names = node.operands()
    experts = dims.value(shapes[names[3]][0], candidate.micro_batch)
    copies = float(dims.numel(shapes[names[1]], candidate.micro_batch))
    ranks, inside = 1, 1
    where: list[str] = []
    for axis, token, matrix in zip(candidate.mesh.axes, tokens, matrices, strict=True):
        dealt = isinstance(matrix, Shard) and matrix.dim == 0
        if dealt or isinstance(token, Shard):
            copies /= axis.size
        inside *= axis.size if isinstance(matrix, Shard) and not dealt else 1
        if dealt and axis.size > 1:
            ranks, where = ranks * axis.size, [*where, f"{axis.name}={axis.size}"]
    if ranks == 1:
        held = f"each cut in {inside}" if inside > 1 else "whole"
        return f"{experts} on every rank, {held}, {copies:,.0f} copies of tokens a rank and micro-batch"
    busiest = assumed.busiest(experts, ranks)
    said = "balanced" if busiest == 1 else f"the busiest {busiest * copies:,.0f}"
    return f"{experts} on {' x '.join(where)}, {copies:,.0f} copies of tokens a rank and micro-batch ({said})"
