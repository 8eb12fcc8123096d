"""Localization of shapes: makes all shapes those of one rank, and replaces operations by the functions that compute them on
shards.

Before (dp=2, tp=4; sizes are global, ``B`` is the global batch)::

    %q: [B, 16, 64] S(0) S(2) = aten.linear(%x, %w)
    %r: [B, 16, 8, 8] S(0) S(2) = aten.reshape(%q, (<B>, 16, 8, 8))
    %m: [] = aten.div.Tensor(%total, <16*B>)

After (sizes are local, ``B`` is the micro-batch of one data-parallel rank)::

    %q: [B, 16, 16] = aten.linear(%x, %w)
    %r: [B, 16, 2, 8] = aten.reshape(%q, (<B>, 16, 2, 8))
    %m: [] = aten.div.Tensor(%total, <32*B>)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir.graph import Arg, Node, Value, draws_masks
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Placements, Shard, local_shape
from autopar.ir.plan import NodePlan
from autopar.operations.communication import CONVERT
from autopar.operations.losses import CHUNK_TOKENS, CROSS_ENTROPY, IN_CHUNKS, WITHIN_LOSS
from autopar.operations.table import operation
from autopar.passes.base import BlockState, Context, producer_indices
from autopar.rules.localize import localize_args, require_whole_examples, scale_batch, with_uneven_sizes


def localize_value(value: Value, placements: Placements, context: Context) -> Value:
    """Return the value with the shape of one rank's shard. PlanError where a sharded dimension is not divisible."""
    shape = tuple(scale_batch(dim, context.data_ranks) for dim in value.shape)
    try:
        return replace(value, shape=local_shape(shape, placements, context.mesh.sizes))
    except ValueError as error:
        raise PlanError(f"{value.name} cannot be sharded {' '.join(map(str, placements))}: {error}") from None


def _by_axis(node: Node, axis: str) -> Node:
    return replace(node, kwargs=(*node.kwargs, ("axis", axis)))


def _function(node: Node, plan: NodePlan, ranks: tuple[int, ...], context: Context) -> Node:
    """Return the node as a call of the plan's function, on the mesh axis that shards the operand which that function names."""
    function = operation(node.op).function(plan.function)
    operand, dim = function.at
    rank, placements = ranks[operand], plan.operands[operand]
    axes = {
        name: where.dim % rank
        for name, where, size in zip(context.mesh.names, placements, context.mesh.sizes, strict=True)
        if isinstance(where, Shard) and size > 1 and (where.dim % rank > 1 if dim is None else where.dim % rank == dim % rank)
    }
    if not axes:
        return node
    if len(axes) > 1:
        raise PlanError(f"{node.name}: {plan.function} runs on one axis, not on {' and '.join(axes)}; plan the model again")
    ((axis, sharded),) = axes.items()
    if context.uneven and axis == DATA_AXIS and not function.uneven:
        raise PlanError(f"{node.name}: {plan.function} takes equal shards of the batch")
    if dim is None:
        node = replace(node, kwargs=(*node.kwargs, ("dim", sharded)))
    return replace((function.rewrite or _by_axis)(node, axis), op=plan.function)


@dataclass(frozen=True, slots=True)
class Localize:
    """Rewrites shapes, size arguments and sharded operations."""

    name: str = "localize"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block, before = state.block, state.block.values()
        after = {name: localize_value(value, state.placements[name], context) for name, value in before.items()}
        for value in before.values() if context.uneven else ():
            require_whole_examples(value, state.placements[value.name], context.mesh)
        plans = {each.node: each for each in context.plan.nodes}
        nodes = [self._node(node, plans.get(node.name), after, state, context) for node in block.nodes]
        changed = replace(
            block,
            inputs=tuple(after[value.name] for value in block.inputs),
            parameters=tuple(replace(parameter, value=after[parameter.value.name]) for parameter in block.parameters),
            nodes=tuple(nodes),
        )
        return replace(state, block=changed, local=True)

    def _node(self, node: Node, plan: NodePlan | None, after: dict[str, Value], state: BlockState, context: Context) -> Node:
        outputs = tuple(after[value.name] for value in node.outputs)
        if node.op == CONVERT:
            return replace(node, outputs=outputs)
        operands = node.operands()
        try:
            if context.uneven:
                node = replace(with_uneven_sizes(node, state.placements, context.mesh), outputs=outputs)
            else:
                node = localize_args(node, [value.shape for value in outputs], context.data_ranks, context.micro_batches)
        except (ValueError, TypeError) as error:
            raise PlanError(f"{node.name} ({node.op}) cannot run on shards: {error}") from None
        if plan is not None and plan.function not in ("", WITHIN_LOSS):
            node = _function(node, plan, tuple(len(after[name].shape) for name in operands), context)
        return self._with_sharded_axes(node, state.placements[node.name], context) if draws_masks(node) else node

    @staticmethod
    def _with_sharded_axes(node: Node, placements: Placements, context: Context) -> Node:
        """Add the axes whose ranks hold different elements, and so draw different random numbers."""
        pairs = zip(context.mesh.names, placements, context.mesh.sizes, strict=True)
        axes = tuple(name for name, where, size in pairs if isinstance(where, Shard) and size > 1)
        return replace(node, kwargs=(*node.kwargs, ("sharded_axes", axes)))


@dataclass(frozen=True, slots=True)
class ChunkLosses:
    """Writes the head, casts of its logits and their loss as one call, where the plan has them in chunks of tokens. After
    `Localize`, which gives the loss of sharded classes its axis.

    Before::

        %logits = aten.linear(%x, %w)
        %wide = aten.to.dtype(%logits, float32)
        %sum = ap.cross_entropy_sum(%wide, %labels, -100, 0.0)

    After::

        %sum = ap.linear_cross_entropy_sum(%x, %w, None, %labels, -100, 0.0, 1024)
    """

    name: str = "chunk_losses"

    def run(self, state: BlockState, context: Context) -> BlockState:
        functions = {each.node: each.function for each in context.plan.nodes}
        nodes, makers = list(state.block.nodes), producer_indices(state.block)
        gone: set[int] = set()
        for index, loss in enumerate(nodes):
            if functions.get(loss.name) not in IN_CHUNKS.values():
                continue
            head = loss
            while head is loss or len(head.operands()) == 1:
                at = makers[head.operands()[0]]
                head = nodes[at]
                if functions.get(head.name) != WITHIN_LOSS:
                    raise PlanError(f"{loss.name} is in chunks, and {head.name} before it is not; plan the model again")
                gone.add(at)
            bias: tuple[Arg, ...] = (*head.args[2:], None)[:1]
            op = IN_CHUNKS[""] if loss.op == CROSS_ENTROPY else loss.op
            nodes[index] = replace(loss, op=op, args=(*head.args[:2], *bias, *loss.args[1:], CHUNK_TOKENS))
        return state.with_nodes([node for index, node in enumerate(nodes) if index not in gone])
