"""Parameter storage and state sharding (ZeRO) as linear expressions: u[parameter, shards, zero], and what a group costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.sizes import itemsize, shards
from autopar.cost_models.state import Group, StateCost, optimizer_named
from autopar.ir.graph import Parameter
from autopar.ir.placement import Placements
from autopar.ir.plan import Precision
from autopar.solve.linear import LinearModel, Terms, add


@dataclass(frozen=True, slots=True)
class Stored:
    """One parameter: what it may be stored as, and the one-hot variables of that."""

    parameter: Parameter
    placements: tuple[Placements, ...]
    chosen: Sequence[int]


@dataclass(frozen=True, slots=True)
class StateTerms:
    """Costs of one group as expressions; seconds in the model's unit, bytes in its unit. See `StateCost`, `Traffic` (a
    later forward gathers what a backward does) and `StateMemory`: `reducing_behind` is `reducing` where that outlives the call's
    backward, `gradients_in_place` are `gradients` where nothing is sharded, `standing` those that are never freed."""

    gather_forward: Terms
    gather_backward: Terms
    reduce: Terms
    optimizer: tuple[Terms, ...]
    parameters: Terms
    gradients: Terms
    optimizer_bytes: Terms
    gathered_standing: Terms
    gathered_passing: Terms
    unreduced: Terms
    reducing: Terms
    reducing_behind: Terms
    gradients_in_place: Terms
    standing: Terms
    accumulated: Terms
    buffer_bytes: float
    reduce_each: Terms
    accumulate: Terms


def split_by_zero(
    model: LinearModel, stored: Stored, stages: Mapping[int, int], sizes: Sequence[int]
) -> dict[int, dict[int, float]]:
    """Per ZeRO stage the parameter's elements on one device, as an expression.

    ``sum_zero u[shards, zero] = sum of w over placements of so many shards``, ``sum_shards u[shards, zero] = z[zero]``.
    """
    count = float(prod(size for size in stored.parameter.value.shape if isinstance(size, int)))
    by_shards: dict[int, list[int]] = {}
    for placements, variable in zip(stored.placements, stored.chosen, strict=True):
        by_shards.setdefault(shards(placements, sizes), []).append(variable)
    if len(stages) == 1:
        (zero,) = stages
        return {zero: {w: count / cut for cut, chosen in by_shards.items() for w in chosen}}
    if len(by_shards) == 1:
        (cut,) = by_shards
        return {zero: {z: count / cut} for zero, z in stages.items()}
    u = {(cut, zero): model.variable(1.0) for cut in by_shards for zero in stages}
    for cut, chosen in by_shards.items():
        model.row([*((u[cut, zero], 1.0) for zero in stages), *((w, -1.0) for w in chosen)], 0.0, 0.0)
    for zero, z in stages.items():
        model.row([*((u[cut, zero], 1.0) for cut in by_shards), (z, -1.0)], 0.0, 0.0)
    return {zero: {u[cut, zero]: count / cut for cut in by_shards} for zero in stages}


def _chord(cost: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """(slope, intercept) of the line through both ends: exact for affine costs, below concave ones."""
    if high <= 0:
        return 0.0, 0.0
    if high - low <= 1e-9 * high:
        return 0.0, cost(high)
    slope = (cost(high) - cost(low)) / (high - low)
    return slope, cost(low) - slope * low


def group_terms(
    model: LinearModel,
    group: Sequence[Stored],
    elements: Sequence[Mapping[int, Terms]],
    stages: Mapping[int, int],
    costs: BlockCosts,
    precision: Precision,
    optimizer: str,
    units: tuple[float, float],
    micro_batches: int = 1,
) -> StateTerms:
    """`group` are the parameters that are moved as one, `elements` their `split_by_zero`, `units` the model's second and byte."""
    second, byte = units
    rule, sizes = optimizer_named(optimizer), costs.mesh.sizes
    real = [(s, e) for s, e in zip(group, elements, strict=True) if not s.parameter.buffer]
    buffers = sum(
        prod(size for size in s.parameter.value.shape if isinstance(size, int)) * itemsize(s.parameter.value.dtype)
        for s in group
        if s.parameter.buffer
    )

    def extent(trainable: bool) -> tuple[float, float]:
        low = high = 0.0
        for s, _ in real:
            if s.parameter.trainable or not trainable:
                count = prod(size for size in s.parameter.value.shape if isinstance(size, int))
                cuts = [shards(at, sizes) for at in s.placements]
                low, high = low + count / max(cuts), high + count / min(cuts)
        return low, high

    whole, trained = extent(False), extent(True)
    out: dict[str, dict[int, float]] = {name: {} for name in _NAMES}
    launches: dict[int, float] = {}
    for zero, z in stages.items():
        every: dict[int, float] = {}
        training: dict[int, float] = {}
        for s, each in real:
            add(every, each[zero])
            if s.parameter.trainable:
                add(training, each[zero])

        def cost(e: float, t: float, tensors: int = 0, zero: int = zero) -> StateCost:
            return costs.group_state(Group(e, t, tensors), zero, precision, rule)

        def seconds(name: str, of: Callable[[float], float], span: tuple[float, float], terms: Terms, z: int = z) -> None:
            slope, intercept = _chord(of, *span)
            add(out[name], terms, slope / second)
            add(out[name], {z: intercept / second})

        seconds("gather_forward", lambda e: cost(e, 0.0).gather_forward_seconds, whole, every)
        seconds("gather_backward", lambda e: cost(e, 0.0).gather_backward_seconds, whole, every)
        seconds("reduce", lambda t: cost(0.0, t).reduce_seconds, trained, training)
        if micro_batches > 1:
            if zero >= 2:
                seconds("reduce_each", lambda t: cost(0.0, t).reduce_seconds, trained, training)
            seconds("accumulate", lambda t, zero=zero: costs.accumulate(cost(0.0, t), zero, precision), trained, training)  # type: ignore[misc]
        seconds("stream", lambda t: cost(0.0, t).optimizer_seconds, trained, training)
        if trained[1]:
            tensors = sum(s.parameter.trainable for s, _ in real)
            add(launches, {z: cost(0.0, 1e-9, tensors).optimizer_seconds / second})
        memory = cost(1.0, 1.0, len(real)).memory
        in_place = memory.gradients if memory.in_place else 0.0
        gathered = "gathered_passing" if memory.gathered_is_transient else "gathered_standing"
        for name, terms, size in (
            ("parameters", every, memory.parameters),
            ("gradients", training, memory.gradients),
            ("optimizer_bytes", training, memory.optimizer),
            (gathered, every, memory.gathered),
            ("unreduced", training, memory.unreduced),
            ("reducing", training, 0.0 if memory.standing else memory.reducing),
            ("reducing_behind", training, 0.0 if memory.in_place else memory.reducing),
            ("gradients_in_place", training, in_place),
            ("standing", training, memory.gradients if memory.standing else 0.0),
            ("accumulated", training, memory.accumulated),
        ):
            if size:
                add(out[name], terms, size / byte)
    return StateTerms(
        out["gather_forward"], out["gather_backward"], out["reduce"], (out["stream"], launches), out["parameters"],
        out["gradients"], out["optimizer_bytes"], out["gathered_standing"], out["gathered_passing"], out["unreduced"],
        out["reducing"], out["reducing_behind"], out["gradients_in_place"], out["standing"], out["accumulated"],
        buffers / byte, out["reduce_each"], out["accumulate"],
    )  # fmt: skip


_NAMES = (
    "gather_forward", "gather_backward", "reduce", "stream", "parameters", "gradients", "optimizer_bytes",
    "gathered_standing", "gathered_passing", "unreduced", "reducing", "reducing_behind", "gradients_in_place", "standing",
    "accumulated", "reduce_each", "accumulate",
)  # fmt: skip
