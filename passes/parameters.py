"""Parameters of one rank's program: casts from the dtype in which they are stored, and copies of what a block returns of their
storage.

`CastParameters` casts from the master dtype to the compute dtype (mixed precision). Before (compute bfloat16, master float32)::

    %w: bfloat16[64, 64]  # parameter
    %y = aten.linear(%x, %w)

After: one cast before the first use. Under FSDP2, whose mixed precision policy all-gathers in the compute dtype, the cast is a
no-op; elsewhere (zero=0) autograd casts the gradient back, so that it is accumulated in the master dtype::

    %w: float32[64, 64]  # parameter
    %w_cast: bfloat16[64, 64] = aten.to.dtype(%w, bfloat16)
    %y = aten.linear(%x, %w_cast)

`CopyParameterViews` copies outputs that share storage with parameters, which FSDP2 frees after the block's forward. Before (a
class token)::

    %tokens = aten.expand(%token, [B, 1, 32])
    return %tokens

After::

    %tokens = aten.expand(%token, [B, 1, 32])
    %tokens_copy = aten.clone(%tokens)
    return %tokens_copy
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Block, DType, Node, Parameter, Ref, with_operands
from autopar.ir.plan import Precision
from autopar.operations.communication import CONVERT
from autopar.operations.pointwise import CAST, CLONE
from autopar.operations.table import operation
from autopar.passes.base import BlockState, Context, first_use_indices, fresh_name


def stored_dtype(dtype: str, precision: Precision) -> str:
    """The dtype in which a tensor that the graph reads as `dtype` is stored."""
    return precision.master if dtype == precision.compute else dtype


@dataclass(frozen=True, slots=True)
class CastParameters:
    """Casts each parameter whose stored dtype is not the one that the block reads."""

    name: str = "cast_parameters"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block, precision = state.block, context.precision
        casts = [p for p in block.parameters if stored_dtype(p.value.dtype, precision) != p.value.dtype]
        if not casts:
            return state
        names, placements, uses = set(block.values()), dict(state.placements), first_use_indices(block)
        renamed: dict[str, str] = {}
        before: dict[int, list[Node]] = {}
        for parameter in casts:
            value = parameter.value
            if value.name not in uses:
                continue
            cast = replace(value, name=fresh_name(f"{value.name}_cast", names))
            renamed[value.name], placements[cast.name] = cast.name, placements[value.name]
            node = Node(CAST, (Ref(value.name), DType(value.dtype)), (), (cast,))
            # A bucket stands where its first conversion stands, so casts of converted parameters come before all of them.
            first = uses[value.name]
            early = first < len(block.nodes) and block.nodes[first].op == CONVERT
            before.setdefault(0 if early else first, []).append(node)
        return replace(state, block=self._rewritten(block, precision, before, renamed), placements=placements)

    @staticmethod
    def _rewritten(block: Block, precision: Precision, before: dict[int, list[Node]], renamed: dict[str, str]) -> Block:
        nodes: list[Node] = []
        for index, node in enumerate(block.nodes):
            nodes += before.get(index, [])
            nodes.append(with_operands(node, [renamed.get(name, name) for name in node.operands()]))
        nodes += before.get(len(block.nodes), [])

        def stored(parameter: Parameter) -> Parameter:
            dtype = stored_dtype(parameter.value.dtype, precision)
            return replace(parameter, value=replace(parameter.value, dtype=dtype))

        return replace(
            block,
            parameters=tuple(map(stored, block.parameters)),
            nodes=tuple(nodes),
            outputs=tuple(renamed.get(name, name) for name in block.outputs),
            updates=tuple((buffer, renamed.get(value, value)) for buffer, value in block.updates),
        )


@dataclass(frozen=True, slots=True)
class CopyParameterViews:
    """Copies views of parameters that are sharded over data ranks (ZeRO): elsewhere their storage stays."""

    name: str = "copy_parameter_views"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block = state.block
        shared = _shared_with_parameters(block)
        copied = [name for name in dict.fromkeys(block.outputs) if name in shared]
        if not copied or not context.plan.zero:
            return state
        values, placements, names = block.values(), dict(state.placements), set(block.values())
        nodes, renamed = list(block.nodes), dict[str, str]()
        for name in copied:
            copy = replace(values[name], name=fresh_name(f"{name}_copy", names))
            renamed[name], placements[copy.name] = copy.name, placements[name]
            nodes.append(Node(CLONE, (Ref(name),), (), (copy,)))
        outputs = tuple(renamed.get(name, name) for name in block.outputs)
        return replace(state, block=replace(block, nodes=tuple(nodes), outputs=outputs), placements=placements)


def _shared_with_parameters(block: Block) -> set[str]:
    """Return the values that may share storage with a parameter."""
    shared = {parameter.value.name for parameter in block.parameters if not parameter.buffer}
    for node in block.nodes:
        operands = node.operands()
        if operands and operands[0] in shared and operation(node.op).shares_storage:
            shared.update(value.name for value in node.outputs)
    return shared
