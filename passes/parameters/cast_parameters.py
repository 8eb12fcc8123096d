"""Casts parameters from the master dtype, in which they are stored, to the compute dtype (mixed precision).

Before (compute bfloat16, master float32)::

    %w: bfloat16[64, 64]  # parameter
    %y = aten.linear(%x, %w)

After: one cast before the first use. Under FSDP2, whose mixed precision policy all-gathers in the compute dtype, the cast is a
no-op; elsewhere (zero=0) autograd casts the gradient back, so that it is accumulated in the master dtype::

    %w: float32[64, 64]  # parameter
    %w_cast: bfloat16[64, 64] = aten.to.dtype(%w, bfloat16)
    %y = aten.linear(%x, %w_cast)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Block, DType, Node, Parameter, Ref
from autopar.ir.plan import Precision
from autopar.operations.communication import CONVERT
from autopar.operations.pointwise import CAST
from autopar.passes.base import BlockState, Context, first_use_indices, fresh_name, with_operands


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
        taken, placements, uses = set(block.values()), dict(state.placements), first_use_indices(block)
        renamed: dict[str, str] = {}
        before: dict[int, list[Node]] = {}
        for parameter in casts:
            value = parameter.value
            if value.name not in uses:
                continue
            cast = replace(value, name=fresh_name(f"{value.name}_cast", taken))
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
