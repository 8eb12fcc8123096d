"""What named functions add to an operation: what they communicate on their axis, and what the busiest rank computes more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

from autopar.cost_models.groups import inner_seconds
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.sizes import itemsize
from autopar.ir import dims
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import NodePlan
from autopar.rules.priced import priced_registry
from autopar.rules.registry import Registry
from autopar.rules.rule import NamedFunction
from autopar.rules.strategy import InnerCollective


@lru_cache(maxsize=1)
def _registry() -> Registry:
    return priced_registry()


def named_function(node: Node, function: str) -> NamedFunction | None:
    """The function of that name in the rule of the node."""
    rule = _registry().rule(node.op)
    return next((named for named in (rule.functions if rule is not None else ()) if named.name == function), None)


def inner_collectives(node: Node, values: Mapping[str, Value], function: str) -> tuple[tuple[str, InnerCollective], ...]:
    """What named function `function` communicates where its factor is sharded: (factor, collective) pairs, from the rules."""
    named = named_function(node, function)
    if named is None or named.collectives is None:
        return ()
    shapes = tuple(values[name].shape for name in node.operands())
    return tuple((named.factor, collective) for collective in named.collectives(node, shapes))


def slowest(node: Node, values: Mapping[str, Value], plan: NodePlan, mesh: Mesh) -> float:
    """How much more than the mean the busiest rank computes."""
    named = named_function(node, plan.function)
    if named is None or named.uneven is None:
        return 1.0
    shapes = tuple(values[name].shape for name in node.operands())
    return prod(
        named.uneven(node, shapes, size)
        for label, size in zip(plan.label, mesh.sizes, strict=True)
        if label.partition(" ")[0] == named.factor
    )


def communicated(
    node: Node, values: Mapping[str, Value], plan: NodePlan, mesh: Mesh, batch: int, cluster: Cluster,
    work: Sequence[int], computing: tuple[float, float],
) -> tuple[tuple[float, ...], tuple[float, ...]]:  # fmt: skip
    """Seconds per axis, forward and backward, that are seen of what the function communicates; `work` is into how many parts each
    axis cuts the work, `computing` what the function computes.
    Blocks that travel behind the computing of those before: of n, all but the first hide so."""
    exposed, behind = ([[0.0] * len(mesh.sizes) for _ in range(2)] for _ in range(2))
    for factor, collective in inner_collectives(node, values, plan.function):
        for axis, label in enumerate(plan.label):
            if label.partition(" ")[0] != factor:
                continue
            full = float(dims.numel(collective.shape, batch) * itemsize(collective.dtype))
            side = (behind if collective.behind else exposed)[collective.backward]
            moving = plan.operands[collective.operand] if collective.operand >= 0 else None
            cuts = work if moving is None else [size if isinstance(moving[at], Shard) else 1 for at, size in enumerate(work)]
            side[axis] += inner_seconds(collective, full, axis, plan.label, cuts, mesh, cluster)
    for seconds, hidden, busy in zip(exposed, behind, computing, strict=True):
        for axis, size in enumerate(mesh.sizes):
            seconds[axis] += max(0.0, hidden[axis] - busy * (size - 1) / size)
    return tuple(exposed[0]), tuple(exposed[1])
