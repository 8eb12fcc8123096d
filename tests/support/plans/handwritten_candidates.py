"""Candidates written by hand: per axis a wish per node, everything else follows the operands; conversions by the shortest way."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.dims import has_batch
from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS, Axis, Mesh
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan, Precision
from autopar.rules.expand import block_strategies
from autopar.rules.registry import AxisStrategy, default_registry
from support.oracles.simulate_blocks import conversion_path

Wish = Mapping[str, str]
"""Node name -> text of the strategy's label and operands, as in ``n: R, S(0)``; a prefix will do."""


def _follow(
    options: tuple[AxisStrategy, ...], node: Node, at: Mapping[str, Placement], values: Mapping[str, Value]
) -> AxisStrategy:
    def misfit(strategy: AxisStrategy) -> float:
        total = 0.0
        for name, wanted in zip(node.operands(), strategy.operands, strict=True):
            there = at.get(name)
            if there is None or there == wanted:
                continue
            total += 1.0 if isinstance(there, Shard | Partial) or isinstance(wanted, Partial) else 0.1
        return total

    return min(options, key=misfit)


def _axis(
    block: Block, mesh: Mesh, axis: int, wish: Wish, symbolic: bool
) -> tuple[dict[str, AxisStrategy], dict[str, Placement]]:
    data = mesh.names[axis] == DATA_AXIS
    options = block_strategies(
        block, mesh.sizes[axis], batch_axis=data, batch_is_symbolic=symbolic, registry=default_registry(),
        any_size=mesh.names[axis] == EXPERT_AXIS,
    )  # fmt: skip
    values = block.values()
    at: dict[str, Placement] = {}
    for value in block.inputs:
        batched = bool(value.shape) and has_batch(value.shape[0])
        at[value.name] = Shard(0) if data and batched else Invariant() if value.differentiable and not data else Replicate()
    for parameter in block.parameters:
        if data or parameter.buffer:
            at[parameter.value.name] = Replicate()
    chosen = {}
    for node in block.nodes:
        wanted = [s for s in options[node.name] if node.name in wish and str(s).startswith(wish[node.name])]
        assert wanted or node.name not in wish, f"{node.name}: {[str(s) for s in options[node.name]]}"
        chosen[node.name] = strategy = wanted[0] if wanted else _follow(options[node.name], node, at, values)
        for name, needed in zip(node.operands(), strategy.operands, strict=True):
            at.setdefault(name, needed if isinstance(needed, Shard) or not values[name].differentiable else Invariant())
        at.update((output.name, place) for output, place in zip(node.outputs, strategy.results, strict=True))
    return chosen, at


def block_plan(block: Block, mesh: Mesh, zero: int, wishes: Mapping[str, Wish], symbolic: bool, batch: int) -> BlockPlan:
    """Outputs leave as Shard(0) on the data axis where they have the batch, Invariant elsewhere."""
    axes = [_axis(block, mesh, axis, wishes.get(name, {}), symbolic) for axis, name in enumerate(mesh.names)]
    values, have = block.values(), {}
    conversions: dict[Conversion, None] = {}

    def convert(name: str, target: Placements) -> None:
        if have[name] == target:
            return
        steps = conversion_path(values[name], have[name], target, mesh.sizes, batch)
        conversions.update((Conversion(name, a, b), None) for a, b in zip(steps, steps[1:], strict=False))

    for name in values:
        have[name] = tuple(at.get(name, Replicate()) for _, at in axes)
    nodes = []
    for node in block.nodes:
        operands = [tuple(s[node.name].operands[i] for s, _ in axes) for i in range(len(node.operands()))]
        results = tuple(tuple(s[node.name].results[i] for s, _ in axes) for i in range(len(node.outputs)))
        for name, needed in zip(node.operands(), operands, strict=True):
            convert(name, needed)
        function = next((s[node.name].function for s, _ in axes if s[node.name].function), "")
        nodes.append(NodePlan(node.name, tuple(operands), results, tuple(s[node.name].factor for s, _ in axes), function))
    outputs = []
    for name in block.outputs:
        value = values[name]
        batched = bool(value.shape) and has_batch(value.shape[0])
        end: Placement = Invariant() if value.differentiable else Replicate()
        outputs.append(tuple(Shard(0) if axis == DATA_AXIS and batched else end for axis in mesh.names))
        convert(name, outputs[-1])
    return BlockPlan(
        block.name,
        tuple(have[value.name] for value in block.inputs),
        tuple(have[parameter.value.name] for parameter in block.parameters),
        tuple(outputs),
        tuple(nodes),
        tuple(conversions),
        zero,
    )


def candidate(
    graph: Graph,
    zero: int = 0,
    wishes: Mapping[str, Mapping[str, Wish]] | None = None,
    precision: Precision | None = None,
    batch: int = 0,
    **axes: int,
) -> Candidate:
    """`wishes`: block -> axis -> node -> strategy."""
    mesh, batch = Mesh(tuple(Axis(name, size) for name, size in axes.items())), batch or graph.batch
    plans = tuple(
        block_plan(block, mesh, zero, (wishes or {}).get(block.name, {}), graph.batch_is_symbolic, batch)
        for block in graph.blocks
    )
    return Candidate(mesh, plans, batch, precision or Precision())


GPT2_TENSOR_PARALLEL: Mapping[str, Mapping[str, Wish]] = {
    "GPT2Block": {"tp": {"attn_c_attn": "n", "sdpa": "batch1", "attn_c_proj": "k", "mlp_c_fc": "n", "mlp_c_proj": "k"}},
    "Prologue": {"tp": {"words": "v"}},
    "Epilogue": {"tp": {"logits": "n"}},
}
