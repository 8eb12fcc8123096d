"""A whole block on simulated ranks with a plan per node: conversions between placements included, in one autograd graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx
import torch
from torch import Tensor

from autopar.ir.graph import Block, Value
from autopar.ir.placement import Invariant, Partial, Placements, Replicate, Shard, local_parts
from autopar.ir.plan import NodePlan
from autopar.rules.conversions import AxisConversion, axis_conversion, changed_axis, placement_states
from support.oracles.simulate_ranks import (
    LABELS,
    Coordinates,
    dual,
    rank_coordinates,
    rename,
    run_ranks,
    shard,
    shard_axis,
    unshard_axis,
)
from support.plans.conversion_graph import single_axis_conversions

Held = dict[Coordinates, Tensor]


def apply_collective(
    kind: str | None, pieces: Sequence[Tensor], source: Any, target: Any, parts: tuple[int, int]
) -> list[Tensor]:
    """What one step of the conversion table does to the pieces of one axis. `parts`: local parts of source and target."""
    size = len(pieces)
    if kind is None:
        return list(pieces)
    if kind == "all_gather":
        return [unshard_axis(pieces, source, parts[0])] * size
    if kind == "all_to_all":
        return shard_axis(unshard_axis(pieces, source, parts[0]), target, parts[1], size)
    if kind in ("all_reduce", "reduce_scatter"):
        whole = torch.stack(list(pieces)).sum(0)
        return [whole] * size if kind == "all_reduce" else shard_axis(whole, target, parts[1], size)
    if kind == "slice":
        return [shard_axis(piece, target, parts[1], size)[rank] for rank, piece in enumerate(pieces)]
    if kind == "pad":
        zeros = [torch.zeros_like(piece) for piece in pieces]
        return [unshard_axis([*zeros[:rank], piece, *zeros[rank + 1 :]], source, parts[0]) for rank, piece in enumerate(pieces)]
    if kind == "mask":
        return [piece if rank == 0 else torch.zeros_like(piece) for rank, piece in enumerate(pieces)]
    assert kind == "scale"
    return [piece / size for piece in pieces]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: AxisConversion, source: Any, target: Any, parts: tuple[int, int], *pieces: Tensor) -> Any:
        ctx.spec = how, source, target, parts
        return tuple(piece.clone() for piece in apply_collective(how.forward, pieces, source, target, parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        how, source, target, (before, after) = ctx.spec
        back = apply_collective(how.backward, grads, dual((target,))[0], dual((source,))[0], (after, before))
        return None, None, None, None, *(piece.clone() for piece in back)


def convert_on_ranks(held: Held, value: Value, source: Placements, target: Placements, sizes: Sequence[int]) -> Held:
    """One arc."""
    axis = changed_axis(source, target)
    how = axis_conversion(source[axis], target[axis], value.differentiable)
    assert how is not None
    parts = tuple(local_parts(where, sizes, axis) if isinstance(where[axis], Shard) else 1 for where in (source, target))
    out: Held = {}
    for at in held:
        if at[axis] == 0:
            group = [(*at[:axis], rank, *at[axis + 1 :]) for rank in range(sizes[axis])]
            pieces = [held[member] for member in group]
            if value.differentiable:
                moved = _Convert.apply(how, source[axis], target[axis], parts, *pieces)
            else:
                moved = apply_collective(how.forward, pieces, source[axis], target[axis], parts)  # type: ignore[arg-type]
            out.update(zip(group, moved, strict=True))
    return out


def conversion_path(value: Value, source: Placements, target: Placements, sizes: Sequence[int], batch: int) -> list[Placements]:
    """A shortest way between two placements of a value."""
    replicated = (Replicate(),) * len(sizes)
    among = placement_states(value.shape, (source, target, replicated), sizes, value.differentiable)
    graph = networkx.DiGraph(list(single_axis_conversions(value.shape, among, sizes, value.differentiable)))
    return networkx.shortest_path(graph, source, target)  # type: ignore[no-any-return]


def run_block(
    block: Block, plans: Mapping[str, NodePlan], placed: Mapping[str, Placements], tensors: Mapping[str, Tensor],
    sizes: Sequence[int], batch: int,
) -> tuple[dict[str, Held], dict[str, Held]]:  # fmt: skip
    """Runs a block. `placed` are the placements of inputs and parameters. Returns the leaves, and outputs placed Invariant."""
    values = block.values()
    leaves = {
        name: {
            at: x.detach().clone().requires_grad_(values[name].differentiable)
            for at, x in shard(tensors[name], where, sizes).items()
        }
        for name, where in placed.items()
    }
    held, where = dict(leaves), dict(placed)

    def at_placement(name: str, target: Placements) -> Held:
        way, found = (
            conversion_path(values[name], where[name], target, sizes, batch) if where[name] != target else [target],
            held[name],
        )
        for before, after in zip(way, way[1:], strict=False):
            found = convert_on_ranks(found, values[name], before, after, sizes)
        return found

    for node in block.nodes:
        plan = plans[node.name]
        renamed = {
            f"{name}#{i}": at_placement(name, target)
            for i, (name, target) in enumerate(zip(node.operands(), plan.operands, strict=True))
        }
        axis = plan.factors.index(LABELS[plan.function]) if plan.function else 0
        local = run_ranks(rename(node), plan.results, sizes, renamed, batch, plan.function, axis)
        for index, value in enumerate(node.outputs):
            held[value.name] = {at: results[index] for at, results in local.items()}
            where[value.name] = plan.results[index]
    equal = {name: (Invariant() if values[name].differentiable else Replicate(),) * len(sizes) for name in block.outputs}
    return leaves, {name: at_placement(name, equal[name]) for name in block.outputs}


__all__ = ["Partial", "convert_on_ranks", "apply_collective", "rank_coordinates", "conversion_path", "run_block"]
