"""Mixture-of-experts layers of a plan: on which ranks the experts are, and how many routed tokens each rank gets."""

from __future__ import annotations

from autopar.cost_models.hardware.expert_load import ExpertLoad, parse_expert_load
from autopar.ir import dims
from autopar.ir.graph import Node
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import Plan
from autopar.operations.table import operation


def expert_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row for each distinct layer: ``experts | DecoderLayer.mlp.experts: 8 on ep=4, 16,384 routed tokens per rank ...``."""
    load = parse_expert_load(plan.document.cluster.description.get("expert_load", {}), "the plan")
    return [
        ("experts", f"{block.name}.{node.module or node.name}: {_layer_text(plan.candidate, block.name, node, sizes, load)}")
        for block in plan.graph.blocks
        for sizes in [{name: value.shape for name, value in block.values().items()}]
        for node in block.nodes
        if operation(node.op).experts
    ]


def _layer_text(candidate: Candidate, block: str, node: Node, shapes: dict[str, dims.Shape], load: ExpertLoad) -> str:
    """Where the experts of one layer are, and the routed tokens (token, expert pairs) of one rank."""
    plan = next(each for each in candidate.block(block).nodes if each.node == node.name)
    tokens, matrices = plan.operands[0], plan.operands[3]
    names = node.operands()
    experts = dims.size_at(shapes[names[3]][0], candidate.micro_batch)
    routed = float(dims.numel(shapes[names[1]], candidate.micro_batch))
    expert_ranks, tensor_ranks = 1, 1
    axes: list[str] = []
    for axis, token, matrix in zip(candidate.mesh.axes, tokens, matrices, strict=True):
        by_expert = isinstance(matrix, Shard) and matrix.dim == 0
        if by_expert or isinstance(token, Shard):
            routed /= axis.size
        tensor_ranks *= axis.size if isinstance(matrix, Shard) and not by_expert else 1
        if by_expert and axis.size > 1:
            expert_ranks, axes = expert_ranks * axis.size, [*axes, f"{axis.name}={axis.size}"]
    per_rank = f"{routed:,.0f} routed tokens per rank and micro-batch"
    if expert_ranks == 1:
        sharding = f"each sharded {tensor_ranks} ways" if tensor_ranks > 1 else "replicated"
        return f"{experts} on every rank, {sharding}, {per_rank}"
    imbalance = load.imbalance(experts, expert_ranks)
    balance = "balanced" if imbalance == 1 else f"busiest rank {imbalance * routed:,.0f}"
    return f"{experts} on {' x '.join(axes)}, {per_rank} ({balance})"
