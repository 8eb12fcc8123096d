"""Seconds and bytes of a group of parameters by ZeRO stage: all-gather of weights, reduction of gradients, optimizer step; and
the seconds in which it is gathered, reduced and accumulated in a step of several micro-batches.

ZeRO-3 all-gathers before every forward and backward; ZeRO-1 and 2 once, before the first forward. ZeRO-2 and 3 reduce after every
micro-batch, since a rank holds no more than its shard of the gradients; ZeRO-0 and 1 accumulate unreduced gradients and reduce
after the last micro-batch (arXiv 1910.02054, sections 5 and 7; FSDP2's ``set_requires_gradient_sync``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.cost_models.comm.collectives import bends, collective_seconds
from autopar.cost_models.hardware.device_specs import AxisLink, Device
from autopar.cost_models.state.optimizers import Optimizer, matrix_update_seconds, optimizer_seconds
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.state.state_memory import StateMemory, StatePolicy, offloaded_update_seconds, state_memory
from autopar.cost_models.tensors.sizes import itemsize
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


@dataclass(frozen=True, slots=True)
class StateCommunication:
    """The seconds of one group in one step.

    gather_first, gather_each: all-gather before the first forward, and before each later one.
    gather_backward: all-gather before each backward.
    reduce_each, reduce_last: reduction after each backward but the last, and after the last.
    accumulate_seconds: added to each backward on the main stream, to add the gradients to those of the micro-batches before (in
        the last one, to write the sum).
    optimizer_seconds: update of the local shard.
    """

    gather_first: float
    gather_each: float
    gather_backward: float
    reduce_each: float
    reduce_last: float
    accumulate_seconds: float
    optimizer_seconds: float

    @staticmethod
    def of(
        cost: StateCost, zero: int, shards: int, device: Device, precision: Precision, micro_batches: int
    ) -> StateCommunication:
        """Return the communication of one group. `shards` are the ranks of the data axis that share one copy of the state."""
        return StateCommunication(
            gather_first=cost.gather_forward_seconds,
            gather_each=cost.gather_forward_seconds if zero == 3 else 0.0,
            gather_backward=cost.gather_backward_seconds,
            reduce_each=cost.reduce_seconds if zero >= 2 else 0.0,
            reduce_last=cost.reduce_seconds,
            accumulate_seconds=accumulate_seconds(cost, zero, shards, device, precision) if micro_batches > 1 else 0.0,
            optimizer_seconds=cost.optimizer_seconds,
        )


def accumulate_seconds(cost: StateCost, zero: int, shards: int, device: Device, precision: Precision) -> float:
    """Return the seconds of one streaming pass, which reads the new gradient (unreduced: in the compute dtype; a reduced shard:
    in the master's), reads and writes the sum, in the master's dtype or, unreduced under ZeRO-1, in the reduce dtype.
    `cost.reduce_bytes` are the trainable elements in the reduce dtype."""
    gradient_shards = shards if zero >= 2 else 1
    compute, reduction = itemsize(precision.compute), itemsize(precision.reduction)
    sum_bytes = reduction if zero == 1 else itemsize(precision.master)
    read = 1.0 if gradient_shards > 1 else compute / sum_bytes
    rate = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    return cost.reduce_bytes * sum_bytes / reduction * (2 + read) / (gradient_shards * rate)
