"""Seconds and bytes of a group of parameters by ZeRO stage: all-gather of weights, reduction of gradients, optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.comm.measured_tables import bends
from autopar.cost_models.hardware.device_specs import AxisLink, Device
from autopar.cost_models.state.offload_cost import offloaded_update_seconds
from autopar.cost_models.state.optimizers import Optimizer, matrix_update_seconds, optimizer_seconds
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.state.state_memory import StateMemory, StatePolicy, state_memory
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class StateCost:
    """The cost of a group under one ZeRO stage, per micro-batch that gathers or reduces.

    gather_forward_seconds, gather_backward_seconds: all-gather of weights on the data axis before the forward and the backward.
    reduce_seconds: reduction of gradients on the data axis after the backward.
    optimizer_seconds: update of the local shard.
    gather_bytes, reduce_bytes: of the unsharded tensors.
    """

    memory: StateMemory
    gather_forward_seconds: float
    gather_backward_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    gather_bytes: float
    reduce_bytes: float

    def __add__(self, other: StateCost) -> StateCost:
        """Return the cost of both groups, one collective after the other."""
        return StateCost(
            self.memory + other.memory,
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self) if field.name != "memory"),
        )


def state_cost(
    group: StateGroup,
    zero: int,
    data: AxisLink,
    device: Device,
    precision: Precision,
    optimizer: Optimizer,
    policy: StatePolicy | None = None,
    across: AxisLink | None = None,
    *,
    owners: AxisLink | None = None,
) -> StateCost:
    """Return the cost of a group. `data` links the ranks that share one copy of the state, `across` equal ranks of several
    copies, between which gradients are all-reduced (HSDP: Zhao et al., arXiv 2304.11277, section 3.2.2). ZeRO 0 all-reduces
    gradients; 1 and 2 all-gather once and reduce-scatter; 3 all-gathers for the backward too (arXiv 1910.02054, section 7: 2, 2,
    2 and 3 times the parameters on the wire). Weights are sent in the compute dtype, gradients in the policy's reduce dtype (the
    master's by default). `owners` links all ranks of the stage, which update whole matrices (None: there are none)."""
    policy = policy or StatePolicy.of(precision, optimizer)
    gather_bytes, reduce_bytes = group.elements * policy.compute_bytes, group.trainable * policy.reduction_bytes
    gather = 0.0
    parts = group.gathered_tensors if zero == 3 and policy.layout.gathers_tensors else 1
    if zero and gather_bytes and policy.layout.owners_broadcast:
        gather = group.tensors * collective_seconds("broadcast", gather_bytes / group.tensors, data)
    elif zero and gather_bytes:
        gather = parts * collective_seconds("parameter_gather", gather_bytes / parts, data)
    reduce = 0.0
    if reduce_bytes:
        reduce = parts * collective_seconds("gradient_scatter" if zero else "all_reduce", reduce_bytes / parts, data)
    if across is not None and reduce_bytes:
        reduce += collective_seconds("all_reduce", reduce_bytes / (data.size if zero else 1), across)
    memory = state_memory(group, zero, data.size, policy, device.kind)
    update = optimizer_seconds(group, zero, data.size, device, precision, optimizer, policy.layout.accesses)
    if owners is not None:
        copies = (across.size if across is not None else 1) * (1 if zero else data.size)
        update += matrix_update_seconds(group.matrices, copies, owners, device, optimizer)
    if policy.offload is not None:
        update = offloaded_update_seconds(update, memory.offloaded, policy.offload, device)
    return StateCost(
        memory=memory,
        gather_forward_seconds=gather,
        gather_backward_seconds=gather if zero == 3 else 0.0,
        reduce_seconds=reduce,
        optimizer_seconds=update,
        gather_bytes=gather_bytes if zero else 0.0,
        reduce_bytes=reduce_bytes,
    )


def state_price_bends(
    zero: int, data: AxisLink, policy: StatePolicy, across: AxisLink | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return where `state_cost` changes its slope: elements at which the all-gather does, and trainable elements at which the
    reduction does. Between them both are concave."""
    gathers = bends("broadcast" if policy.layout.owners_broadcast else "parameter_gather", data) if zero else ()
    reductions = bends("gradient_scatter" if zero else "all_reduce", data)
    if across is not None:
        reductions += tuple(size * (data.size if zero else 1) for size in bends("all_reduce", across))
    gathered, reduced = (size / policy.compute_bytes for size in gathers), (size / policy.reduction_bytes for size in reductions)
    return tuple(gathered), tuple(reduced)
