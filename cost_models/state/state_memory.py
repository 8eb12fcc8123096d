"""Memory of parameters, gradients and optimizer state under ZeRO, in bytes on one device; and of optimizer state that lies in
host memory, or on NVMe, between steps the bytes on the device meanwhile, and the seconds of its update.

The update is that of the runtime (`runtime/state/offload_optimizer.py`): parameters in parts, the state of a part copied to the
device, updated there, and copied back, while that of the next part is on its way. All copies share one CUDA stream, so that
reading and writing add up: an update takes ``max(update on the device, state / read bandwidth + state / write bandwidth)`` where
there are several parts; one part alone takes the sum, which is at most one part's update longer. (ZeRO-Infinity, arXiv
2104.07857, section 4: what bounds an offloaded optimizer is the bandwidth to where its state lies, which is read and written once
a step; NVMe is the same with a lower bandwidth.) On a CPU nothing overlaps: they add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device, OffloadTarget
from autopar.cost_models.hardware.software_traits import StateLayout
from autopar.cost_models.state.optimizers import Optimizer
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.tensors.sizes import itemsize
from autopar.errors import PlanError
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Bytes per parameter: a software's state layout, with the dtypes and the optimizer of a run put in.

    gradient_bytes: of a gradient element where it is kept for the update.
    reduction_bytes: of one on the wire, in its buffer, and where it waits unreduced for the next micro-batch (FSDP2).
    optimizer_bytes: of the optimizer's state tensors.
    stored_compute: a copy of the weights in the compute dtype lives through the step beside the master weights (Megatron, the
        ZeRO paper); else it is made for the forward and freed after the backward (FSDP2), and is not needed where the dtypes
        agree.
    stored_master_bytes: of a stored master weight; less than `master_bytes` where the compute weight has its other half.
    rest_bytes: of the optimizer's state tensors of what is no matrix (0: `optimizer_bytes`).
    offload: where the optimizer's state lies between steps; None: on the device.
    """

    compute_bytes: int
    master_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    stored_compute: bool = False
    stored_master_bytes: int = 0
    layout: StateLayout = StateLayout()
    offload: OffloadTarget | None = None
    reduce_bytes: int = 0
    rest_bytes: int = 0

    @property
    def reduction_bytes(self) -> int:
        return self.reduce_bytes or self.gradient_bytes

    @staticmethod
    def of(
        precision: Precision, optimizer: Optimizer, layout: StateLayout | None = None, offload: OffloadTarget | None = None
    ) -> StatePolicy:
        """Return the policy under `layout`; without it, that of autopar's own programs."""
        compute, master, layout = itemsize(precision.compute), itemsize(precision.master), layout or StateLayout()
        remainders = layout.master_remainders and layout.stored_compute and (precision.compute, master) == ("bfloat16", 4)
        in_bfloat16 = layout.bfloat16_gradient_bytes if precision.compute == "bfloat16" else 0
        return StatePolicy(
            compute_bytes=compute,
            master_bytes=master,
            gradient_bytes=min(master, in_bfloat16 or layout.gradient_bytes or master),
            optimizer_bytes=optimizer.state_bytes(master),
            stored_compute=layout.stored_compute and compute != master,
            stored_master_bytes=2 if remainders else 0,
            layout=layout,
            offload=offload,
            reduce_bytes=itemsize(precision.reduce) if precision.reduce else 0,
            rest_bytes=optimizer.rest_tensors * master,
        )


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes of one group of parameters on one device.

    parameters: master weights, and the compute copy where that is stored.
    gradients: reduced gradients, from the backward to the optimizer step.
    gathered: unsharded weights in the compute dtype.
    gathered_is_transient: ZeRO-3 holds `gathered` while the block computes (with prefetch, for two blocks at a time); else it
        stays from forward to backward.
    unsharded_gradients: as autograd makes them, while the block's backward runs.
    reduce_buffer: the gradients are copied into it to be reduced. It lives until the next block's is reduced (FSDP2), or, with
        `reduced_in_place` (nothing is sharded), only until it replaces the gradients.
    buffers: buffers of the model.
    accumulated: gradients held between micro-batches.
    update_temporaries: one temporary of the master's size for every trainable parameter (foreach optimizers).
    largest_tensor: such a temporary for the largest parameter.
    persistent_reduce_buffer: the buffer is reused in the next step and never freed (CPU: runtime `gradient_buckets`).
    offloaded: the optimizer's state, where it lies in host memory (or on NVMe) between steps; `optimizer` is 0 then.
    offloaded_masters: the trainable master weights that it belongs to.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    gathered_is_transient: bool
    unsharded_gradients: float
    reduce_buffer: float = 0.0
    buffers: float = 0.0
    reduced_in_place: bool = False
    accumulated: float = 0.0
    update_temporaries: float = 0.0
    largest_tensor: float = 0.0
    persistent_reduce_buffer: bool = False
    offloaded: float = 0.0
    offloaded_masters: float = 0.0

    # by the flags, as the integer program has them (`solve.ilp.formulation.StateTerms`), where a flag is a choice

    @property
    def gathered_transient(self) -> float:
        """`gathered` where it is there while the call computes."""
        return self.gathered if self.gathered_is_transient else 0.0

    @property
    def gathered_persistent(self) -> float:
        """`gathered` where it stays from forward to backward."""
        return 0.0 if self.gathered_is_transient else self.gathered

    @property
    def freed_reduce_buffer(self) -> float:
        """`reduce_buffer` where it is freed in the step."""
        return 0.0 if self.persistent_reduce_buffer else self.reduce_buffer

    @property
    def overlapped_reduce_buffer(self) -> float:
        """`reduce_buffer` where it outlives the backward of its call."""
        return 0.0 if self.reduced_in_place else self.reduce_buffer

    @property
    def gradients_in_place(self) -> float:
        """`gradients` where they are reduced in place."""
        return self.gradients if self.reduced_in_place else 0.0

    @property
    def persistent_gradients(self) -> float:
        """`gradients` where they are in a buffer that is never freed."""
        return self.gradients if self.persistent_reduce_buffer else 0.0

    def __add__(self, other: StateMemory) -> StateMemory:
        """Join the groups of one block call (its own parameters, and its experts), which are live at the same time. An optimizer
        that updates one parameter after the other has a temporary of the largest of both."""
        first, second = (tuple(getattr(each, field.name) for field in fields(self)) for each in (self, other))
        both = StateMemory(*(a or b if isinstance(a, bool) else a + b for a, b in zip(first, second, strict=True)))
        return replace(both, largest_tensor=max(self.largest_tensor, other.largest_tensor))

    @staticmethod
    def merged(groups: Sequence[StateMemory]) -> StateMemory:
        """Return the shared parameters of several model chunks of one stage as one group; flags are those of the first."""
        sums = {
            field.name: sum(getattr(group, field.name) for group in groups)
            for field in fields(StateMemory)
            if field.name not in ("gathered_is_transient", "reduced_in_place", "persistent_reduce_buffer", "largest_tensor")
        }
        return replace(groups[0], **sums, largest_tensor=max(group.largest_tensor for group in groups))


def state_memory(group: StateGroup, zero: int, shards: int, policy: StatePolicy, kind: str = "cuda") -> StateMemory:
    """Return the bytes of `group` under ZeRO stage `zero` over `shards` data ranks, on devices of this `kind`. (A group of one
    parameter that is not sharded needs no buffer to reduce its gradient.)"""
    n = float(shards)
    elements, trainable = group.elements, group.trainable
    optimizer_shards = n if zero >= 1 else 1.0
    parameters = elements * (policy.stored_master_bytes or policy.master_bytes) / optimizer_shards
    if policy.stored_compute:
        parameters += elements * policy.compute_bytes / (n if zero == 3 else 1.0)
    sharded = zero >= 1 and shards > 1
    separate_copy = policy.compute_bytes != policy.master_bytes or sharded
    unsharded = reduce_buffer = 0.0
    if not policy.stored_compute:
        unsharded = trainable * policy.compute_bytes if sharded else 0.0
        copied = sharded or group.tensors > 1 or policy.reduction_bytes != policy.gradient_bytes
        reduce_buffer = trainable * policy.reduction_bytes if shards > 1 and copied else 0.0
    gradients = trainable * policy.gradient_bytes / (n if zero >= 2 or (zero == 1 and not policy.stored_compute) else 1.0)
    state_bytes: float = policy.optimizer_bytes
    if policy.rest_bytes:
        state_bytes = group.matrix_share * policy.optimizer_bytes + (1 - group.matrix_share) * policy.rest_bytes
    return StateMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=0.0 if policy.offload else trainable * state_bytes / optimizer_shards,
        gathered=elements * policy.compute_bytes if separate_copy and not policy.stored_compute else 0.0,
        gathered_is_transient=zero == 3,
        unsharded_gradients=unsharded,
        reduce_buffer=reduce_buffer,
        buffers=group.buffer_bytes,
        reduced_in_place=not sharded,
        accumulated=trainable * policy.reduction_bytes if zero == 1 else gradients,
        update_temporaries=trainable * policy.master_bytes / optimizer_shards * policy.layout.update_copies,
        largest_tensor=min(group.largest, trainable) * policy.master_bytes / optimizer_shards,
        persistent_reduce_buffer=kind == "cpu" and not sharded and group.tensors > 1 and reduce_buffer > 0,
        offloaded=trainable * state_bytes / optimizer_shards if policy.offload else 0.0,
        offloaded_masters=trainable * policy.master_bytes / optimizer_shards if policy.offload else 0.0,
    )


PART_BYTES = 2.0**28
"""Bytes of the parameters of one part (`offload_optimizer.PART_BYTES`)."""

_PARTS = 2
"""Parts whose state is on the device: the one that is updated, and the one that is on its way."""


def offloaded_update_seconds(update_seconds: float, state_bytes: float, target: OffloadTarget, device: Device) -> float:
    """Return the seconds of updating a shard whose `state_bytes` lie at `target`. `update_seconds`: on the device."""
    copies = sum(target.copy_seconds(state_bytes))
    return update_seconds + copies if device.kind == "cpu" else max(update_seconds, copies)


def update_temporaries(states: Sequence[StateMemory], foreach: bool) -> float:
    """Return the bytes that the optimizer's update has on the device beside parameters and gradients: temporaries, and the state
    of the parts that pass through where it is offloaded."""
    largest = max(state.largest_tensor for state in states)
    masters = sum(state.offloaded_masters for state in states)
    temporaries = sum(state.update_temporaries for state in states) if foreach else 2 * largest
    if not masters:
        return temporaries
    part = max(PART_BYTES, largest)
    passing = min(1.0, _PARTS * part / masters) * sum(state.offloaded for state in states)
    return (min(temporaries, part) if foreach else temporaries) + passing


def offload_target(cluster: Cluster, where: str, what: str) -> OffloadTarget:
    """Return the host memory (``cpu``) or NVMe of one device. PlanError where the cluster describes none of it."""
    key = "host" if where == "cpu" else "nvme"
    target: OffloadTarget | None = getattr(cluster, key)
    if target is None:
        raise PlanError(
            f"the description of {cluster.name} has no {key}, so no {what} can be offloaded to it: add `{key}:`, or plan "
            "without offloading"
        )
    return target


def optimizer_target(cluster: Cluster, precision: Precision) -> OffloadTarget | None:
    """Return where the optimizer's state lies between steps; None where it stays on the device."""
    where = precision.offload_optimizer
    return offload_target(cluster, where, "optimizer state") if where else None
