"""Which operations of a block a compiler fuses into kernels, and which values stay inside of one: a streaming (pointwise,
reduction) operation's result is written only where another operation needs it (`kernel_accesses` counts what is). And tensors
that software with fused kernels saves for the backward (`StateLayout.fused_saves`): a norm its input, a gated activation the
operands of its kernel, a loss its logits. What autograd would save of the single operations is recomputed inside the backward's
kernel.

Transformer Engine, apex and Megatron's ``bias_swiglu_fusion``; flash-attention's cross entropy. Times do not change: the
constants of a stack say what its kernels reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Block, Node
from autopar.ir.plan_file.document import SavedTensors
from autopar.operations.table import operation


def is_streaming(node: Node) -> bool:
    """Whether the operation may be fused: no product, lookup, loss or routed experts."""
    record = operation(node.op)
    return record.flops is None and not record.lookup and not record.loss


def values_in_registers(block: Block) -> frozenset[str]:
    """Return the values, and views of them, that streaming operations make and only streaming operations read."""
    made: set[str] = set()
    outside = set(block.outputs) | {name for _, name in block.updates}
    viewed: dict[str, str] = {}
    for node in block.nodes:
        operands = node.operands()
        if operation(node.op).view and operands:
            for value in node.outputs:
                viewed[value.name] = viewed.get(operands[0], operands[0])
                if operands[0] in made:
                    made.add(value.name)
        elif is_streaming(node):
            made.update(value.name for value in node.outputs)
        else:
            outside.update(operands)
    outside |= {viewed[name] for name in outside if name in viewed}
    return frozenset(name for name in made if viewed.get(name, name) not in outside and name not in outside)


def with_fused_saves(block: Block, saved: Mapping[str, SavedTensors], loss: bool = True) -> dict[str, SavedTensors]:
    """`saved` by node, for kernels that are fused over neighbouring streaming operations; `loss`: the loss is one too. (A
    compiler fuses layers so: torch.compile's min-cut partitioner recomputes streaming operations in the backward. The loss is
    outside.)"""
    found = dict(saved)
    values = block.values()
    inside = values_in_registers(block)
    makers = {value.name: node for node in block.nodes for value in node.outputs}
    seen = set[str]()

    def keep_operands(node: Node) -> None:
        """The inputs of the kernel that `node` is part of are saved: operands that the kernel makes itself lead further up."""
        further = [node]
        while further:  # each node once: a chain of sums of two has more paths than can be walked
            node = further.pop()
            if node.name in seen:
                continue
            seen.add(node.name)
            view = operation(node.op).view
            for index, name in enumerate(node.operands()[: 1 if view else None]):
                if name in inside and (view or values[name].differentiable):
                    further.append(makers[name])
                elif view or values[name].differentiable:
                    flags = found[node.name].operands
                    found[node.name] = replace(found[node.name], operands=(*flags[:index], True, *flags[index + 1 :]))

    for node in block.nodes:
        what, record = saved[node.name], operation(node.op)
        fused_loss = record.loss and not record.in_place  # Megatron's own, in place, saves the softmax in float32
        if fused_loss and not loss:
            continue
        if fused_loss and what.extra_ratio:
            logits = tuple(index == 0 for index, _ in enumerate(what.operands))
            found[node.name] = replace(
                what, operands=logits, extra_ratio=0.0, forward_workspace_ratio=0.0, backward_workspace_ratio=0.0
            )
        elif is_streaming(node) and not record.view:
            found[node.name] = _without_inner(node, what, inside)
            if what.extra_ratio or found[node.name] != what:
                found[node.name] = replace(found[node.name], extra_ratio=0.0)
                keep_operands(node)
    return found


def _without_inner(node: Node, what: SavedTensors, inside: frozenset[str]) -> SavedTensors:
    """Return the tensors without those that only the kernel itself sees."""
    operands = tuple(flag and name not in inside for name, flag in zip(node.operands(), what.operands, strict=True))
    results = tuple(flag and value.name not in inside for value, flag in zip(node.outputs, what.results, strict=True))
    return replace(what, operands=operands, results=results)
