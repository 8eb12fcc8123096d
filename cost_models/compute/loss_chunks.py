"""Costs of a loss in chunks of tokens (`rules.loss_chunks`): the forward makes the gradients of the head's operands, and the
backward scales them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod

from autopar.cost_models.tensors.sizes import itemsize, shard_count, value_bytes
from autopar.ir import dims
from autopar.ir.graph import Node, Value
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import NodePlan
from autopar.operations.losses import CHUNK_TOKENS, WITHIN_LOSS, runs_in_chunks
from autopar.operations.table import operation


def chunk_count(node: Node, values: Mapping[str, Value], plan: NodePlan, axis_sizes: Sequence[int], batch: int) -> int:
    """Return the chunks of one rank's tokens; 1 where the plan has none."""
    if not runs_in_chunks(plan.function):
        return 1
    within = plan.function == WITHIN_LOSS
    logits, at = (node.outputs[0], plan.results[0]) if within else (values[node.operands()[0]], plan.operands[0])
    shape = dims.shape_at(logits.shape, batch)[:-1]
    cuts = (size for place, size in zip(at, axis_sizes, strict=True) if isinstance(place, Shard) and place.dim < len(shape))
    return max(1, ceil(prod(shape) / prod(cuts) / CHUNK_TOKENS))


def gradient_bytes(
    node: Node, values: Mapping[str, Value], operands: Sequence[Placements], axis_sizes: Sequence[int], batch: int
) -> float:
    """Return the bytes of the gradients that the head saves for its backward."""
    if not operation(node.op).product:
        return 0.0
    pairs = ((values[name], at) for name, at in zip(node.operands(), operands, strict=True))
    return sum(value_bytes(value, batch) / shard_count(at, axis_sizes) for value, at in pairs if value.differentiable)


def chunk_bytes(node: Node, logits_bytes: float, chunks: int) -> float:
    """Return the bytes of the logits of one chunk, which become their gradient in place: in half precision the logits, their
    float32 copy and the gradient, of which two are there at once."""
    if not operation(node.op).product:
        return 0.0
    size = itemsize(node.outputs[0].dtype)
    return logits_bytes / chunks * (3.0 if size == 2 else 1.0)
