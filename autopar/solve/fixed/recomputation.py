"""The recomputation of a fixed configuration: whole layers, the attention core, or all but some matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.cost_models.step.recompute import overwritten_values, recomputable_nodes
from autopar.ir.graph import Block, Node
from autopar.ir.placement import Partial
from autopar.ir.plan import BlockPlan
from autopar.operations.table import operation
from autopar.solve.fixed.configuration import FixedConfiguration


def with_recomputation(block: Block, plan: BlockPlan, fixed: FixedConfiguration, repeated: set[str]) -> BlockPlan:
    """The plan of a block with what the configuration recomputes, but for what reads buffers that the forward has updated."""
    plan = _with_recomputation(block, plan, fixed, repeated)
    if not (plan.recompute_nodes or plan.recompute_conversions):
        return plan  # the same object: its trace is known (`evaluate`)
    return _without_updated_buffers(block, plan)


def with_all_recomputed(block: Block, plan: BlockPlan) -> BlockPlan:
    """Return the plan that recomputes a block, but for what reads buffers that the forward has updated."""
    if not overwritten_values(block):
        return replace(plan, recompute=True)
    return _without_updated_buffers(block, _with_every_node(block, plan))


def _with_every_node(block: Block, plan: BlockPlan) -> BlockPlan:
    return replace(plan, recompute_nodes=tuple(node.name for node in block.nodes), recompute_conversions=plan.conversions)


def _without_updated_buffers(block: Block, plan: BlockPlan) -> BlockPlan:
    recomputable, overwritten = recomputable_nodes(block), overwritten_values(block)
    return replace(
        plan,
        recompute_nodes=tuple(name for name in plan.recompute_nodes if name in recomputable),
        recompute_conversions=tuple(each for each in plan.recompute_conversions if each.value not in overwritten),
    )


def _with_recomputation(block: Block, plan: BlockPlan, fixed: FixedConfiguration, repeated: set[str]) -> BlockPlan:
    if fixed.recompute == "none" or plan.block not in repeated:
        return plan
    if fixed.recompute == "full":
        return with_all_recomputed(block, plan)
    if fixed.recompute == "everything":
        return _with_every_node(block, plan)
    if fixed.recompute == "products":
        return _all_but(block, plan, _half_of_products(block))
    if fixed.recompute == "modules":
        chosen = {name for module in fixed.modules for name in MODULES[module](block)}
        return replace(plan, recompute_nodes=tuple(node.name for node in block.nodes if node.name in chosen))
    return replace(plan, recompute_nodes=attention_core(block))


def _norms(block: Block) -> set[str]:
    return {node.name for node in block.nodes if operation(node.op).norm}


def _between_latent_and_attention(block: Block) -> set[str]:
    """Return what lies between a latent and attention: products that widen it, rotations; the norm of the latent is saved."""
    makers = {value.name: node for node in block.nodes for value in node.outputs}
    chosen: set[str] = set()
    for node in block.nodes:
        if operation(node.op).attention and _from_latent(node, block):
            pending = list(node.operands())
            while pending:
                maker = makers.get(pending.pop())
                if maker is None or maker.name in chosen or operation(maker.op).norm:
                    continue
                if not operation(maker.op).product or _widens(maker, block):
                    chosen.add(maker.name)
                    pending += maker.operands()
    return chosen


def _dense_mlp(block: Block) -> set[str]:
    """Return the MLP of a layer without experts: what lies between the second product after attention, the first of the MLP, and
    the last product."""
    if any(operation(node.op).experts for node in block.nodes):
        return set()
    attention = [at for at, node in enumerate(block.nodes) if operation(node.op).attention]
    products = [at for at, node in enumerate(block.nodes) if operation(node.op).product and attention and at > attention[-1]]
    return {node.name for node in block.nodes[products[1] : products[-1]]} if len(products) > 2 else set()


MODULES: Mapping[str, Callable[[Block], set[str]]] = {
    "layernorm": _norms,
    "mla_up_proj": _between_latent_and_attention,
    "mlp": _dense_mlp,
    "core_attn": lambda block: set(attention_core(block)),
}
"""Nodes of a layer that Megatron's ``--recompute-modules`` computes again (megatron/core/transformer/transformer_config.py,
`recompute_modules`). ``moe_act`` is inside the operation of routed experts, which says itself whether it is computed again."""


def _widens(node: Node, block: Block) -> bool:
    values = block.values()
    return int(values[node.outputs[0].name].shape[-1]) > int(values[node.operands()[0]].shape[-1])


def _from_latent(node: Node, block: Block) -> bool:
    """Return whether heads of queries and values differ in size, as those from latents do."""
    query, _, value = (block.values()[name].shape for name in node.operands()[:3])
    return query[-1] != value[-1]


def _half_of_products(block: Block) -> set[str]:
    """Return what selective checkpointing per operation saves: attention, and of the matrix products the first, third ...
    (torchtitan, ``_apply_op_sac_to_transformer_block``)."""
    products = [node.name for node in block.nodes if operation(node.op).product]
    return {*products[::2], *(node.name for node in block.nodes if operation(node.op).attention)}


def _all_but(block: Block, plan: BlockPlan, saved: set[str]) -> BlockPlan:
    """Everything is recomputed but `saved` nodes and the reduction of partial sums."""
    recomputed = tuple(node.name for node in block.nodes if node.name not in saved)
    conversions = tuple(
        conversion for conversion in plan.conversions if not any(isinstance(place, Partial) for place in conversion.source)
    )
    return replace(plan, recompute_nodes=recomputed, recompute_conversions=conversions)


def attention_core(block: Block) -> tuple[str, ...]:
    """The nodes between query, key, value and the context: the selective recomputation of arXiv 2205.05198, section 5.

    Attention that is one operation; or, of scores, softmax and context, the nodes from a product of two computed
    tensors to the next one.
    """
    values = {value.name for value in (*block.inputs, *(p.value for p in block.parameters))}
    computed = [node for node in block.nodes if operation(node.op).batched and not values & set(node.operands())]
    core = {node.name for node in block.nodes if operation(node.op).attention}
    makers = {value.name: node for node in block.nodes for value in node.outputs}
    for scores, context in zip(computed[::2], computed[1::2], strict=False):
        core |= _between(scores, context, makers)
    return tuple(node.name for node in block.nodes if node.name in core)


def _between(first: Node, last: Node, makers: Mapping[str, Node]) -> set[str]:
    """Nodes on the way from `first` to `last`, both among them; none where there is no way."""

    def leads(node: Node) -> set[str]:
        if node.name == first.name:
            return {node.name}
        between: set[str] = set()
        for name in node.operands():
            if name in makers:
                between |= leads(makers[name])
        return between | {node.name} if between else set()

    return leads(last)
