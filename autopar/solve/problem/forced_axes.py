"""The work that a forced model axis has to shard: the operations whose sizes allow it, and messages on those whose sizes do not.

One rule for every search (`ilp.formulate`, `bounds.memory_frontier`): of the FLOPs that an axis of a forced degree can shard, at
most `MOST_REDUNDANT` are computed whole, on every rank of the axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.ir import dims
from autopar.ir.graph import Block, Node
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.plan import BlockPlan, Candidate
from autopar.solve.problem.pins import operation_text
from autopar.solve.problem.problem import NodeStrategy, Problem

REDUNDANT_SHARE = 0.0133
"""The share that a forced axis repeats at most of the FLOPs that it can shard, without recomputation. What is recomputed counts
1.5 times at most (a product with one gradient: two passes, and one again), so that a plan repeats `MOST_REDUNDANT` at most."""

MOST_REDUNDANT = 0.02
"""The share that a plan may repeat, with recomputation."""

_WITH_RECOMPUTATION = 1.5

_NAMED = 3
"""Operations that a message names."""

_WORTH_A_NOTE = 0.02
"""The share of all FLOPs from which on it is told that sizes forbid to shard them."""

_MOST_FORBIDDEN = 0.5
"""The share from which on the degree is refused: ranks of such an axis would do the same work."""

Key = tuple[str, str]
"""A block and its node."""


@dataclass(slots=True)
class ForcedWork:
    """The work that some forced axes (several where an operation can be sharded over each of them, but not over all) must not
    repeat.

    whole: per operation, FLOPs of a step's calls that each of its strategies repeats though it could be sharded. shardable:
    FLOPs of all operations that can be sharded. forbidden: those whose sizes do not divide, with their FLOPs.
    """

    axes: tuple[int, ...]
    whole: dict[Key, tuple[float, ...]] = field(default_factory=dict)
    shardable: float = 0.0
    forbidden: dict[Key, float] = field(default_factory=dict)

    @property
    def forbidden_share(self) -> float:
        """The share of all FLOPs whose sizes do not divide."""
        size = sum(self.forbidden.values())
        return size / (self.shardable + size) if size else 0.0


def forced_axes(mesh: Mesh, force: Mapping[str, int]) -> tuple[int, ...]:
    """The model axes whose degree the user forces."""
    return tuple(i for i, axis in enumerate(mesh.axes) if axis.name != DATA_AXIS and axis.name in force and axis.size > 1)


def forced_work(problem: Problem, axes: Collection[int]) -> tuple[ForcedWork, ...]:
    """Return the work of each axis, and of all together where operations have to choose between them."""
    each = {axis: ForcedWork((axis,)) for axis in axes}
    either = ForcedWork(tuple(axes))
    for key, flops, strategies in _products(problem):
        repeated = [tuple(strategy.redundant_flops[axis] > 0 for axis in axes) for strategy in strategies]
        least = min(map(sum, repeated))
        able = [axis for number, axis in enumerate(axes) if not all(way[number] for way in repeated)]
        for axis in axes:
            if axis not in able:
                each[axis].forbidden[key] = flops
        if least == len(axes) - len(able):
            for axis in able:
                each[axis].shardable += flops
                each[axis].whole[key] = tuple(flops * way[axes.index(axis)] for way in repeated)  # type: ignore[attr-defined]
        else:
            either.shardable += flops
            either.whole[key] = tuple(flops * (sum(way) - least) for way in repeated)
    return tuple(work for work in (*each.values(), either) if work.shardable or work.forbidden)


def _products(problem: Problem) -> Iterator[tuple[Key, float, tuple[NodeStrategy, ...]]]:
    """The operations with FLOPs, forward and backward over all calls."""
    for name, table in problem.blocks.items():
        for node, strategies in table.strategies.items():
            profile = table.costs.profile(node)
            flops = problem.graph.count(name) * (profile.forward_flops + profile.backward_flops)
            if flops:
                yield (name, node), flops, strategies


def check_forced_axes(problem: Problem, axes: Collection[int], pinned: Sequence[str] = ()) -> None:
    """Raise PlanError where a forced axis can shard less than half of the FLOPs, with the operations and sizes that forbid it.
    `pinned`: the pins that may forbid it too."""
    for work in forced_work(problem, axes):
        if work.forbidden_share > _MOST_FORBIDDEN:
            share = f"only {100 * (1 - work.forbidden_share):.1f} % of the FLOPs" if work.shardable else "none of the FLOPs"
            raise PlanError(f"{_degrees(problem, work)} can shard {share}: {_forbidding(problem, work, pinned)}")


def forced_axis_notes(problem: Problem, axes: Collection[int], pinned: Sequence[str] = ()) -> tuple[str, ...]:
    """Write a line for each forced axis that cannot shard a part worth a note."""
    return tuple(
        f"{_degrees(problem, work)} computes {100 * work.forbidden_share:.1f} % of the FLOPs on every rank: "
        + _forbidding(problem, work, pinned)
        for work in forced_work(problem, axes)
        if work.forbidden_share > _WORTH_A_NOTE
    )


def why_disobeyed(problem: Problem, candidate: Candidate, axes: Collection[int]) -> str:
    """Say in a line what a plan computes whole on a forced axis that could shard it; empty where that is little enough."""
    chosen = {(plan.block, node.node): node for plan in candidate.blocks for node in plan.nodes}
    twice = {(plan.block, node.node) for plan in candidate.blocks for node in plan.nodes if _recomputes(plan, node.node)}
    for work in forced_work(problem, axes):
        whole = dict.fromkeys(work.whole, 0.0)
        for (block, node), per_strategy in work.whole.items():
            of = problem.blocks[block].strategies[node]
            number = next(i for i, strategy in enumerate(of) if strategy.plan == chosen[block, node])
            whole[block, node] = per_strategy[number] * (_WITH_RECOMPUTATION if (block, node) in twice else 1.0)
        if sum(whole.values()) > MOST_REDUNDANT * work.shardable:
            worst = sorted((key for key, flops in whole.items() if flops), key=lambda key: -whole[key])
            products = ", ".join(_product_text(problem, key) for key in worst[:_NAMED])
            share = 100 * sum(whole.values()) / work.shardable
            return (
                f"{_degrees(problem, work)} cannot be obeyed: {share:.1f} % of the FLOPs that it can shard stay whole "
                f"({products}): force another degree, or leave it open"
            )
    return ""


def _recomputes(plan: BlockPlan, node: str) -> bool:
    return plan.recompute or node in plan.recompute_nodes


def _degrees(problem: Problem, work: ForcedWork) -> str:
    return ",".join(f"{problem.mesh.axes[axis].name}={problem.mesh.axes[axis].size}" for axis in work.axes)


def _forbidding(problem: Problem, work: ForcedWork, pinned: Sequence[str]) -> str:
    worst = sorted(work.forbidden, key=lambda key: -work.forbidden[key])
    products = ", ".join(_product_text(problem, key) for key in worst[:_NAMED])
    more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    if pinned:
        return f"its size or pins ({'; '.join(pinned)}) keep {products}{more} whole: change one of them"
    return f"it divides no size of {products}{more}: force a degree that does"


def _product_text(problem: Problem, key: Key) -> str:
    """Describe a node: ``aten.linear [16, 7] x [5, 7] at mlp.up of Layer (net.py:12)``."""
    block: Block = problem.blocks[key[0]].block
    node: Node = next(node for node in block.nodes if node.name == key[1])
    values = block.values()
    sizes = [dims.shape_at(values[name].shape, problem.graph.batch) for name in node.operands()]
    shapes = " x ".join(str(list(size)) for size in sizes if len(size) > 1) or str([list(size) for size in sizes])
    return operation_text(block, node, shapes)
