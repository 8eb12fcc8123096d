"""What the parameters cost: memory of weights, gradients and optimizer state under ZeRO 0..3, gathers, reductions, the update.

ZeRO: Rajbhandari et al., arXiv 1910.02054, section 3 and table 1. A group is what one block call owns, moved as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLink, Device
from autopar.cost_models.keeping import Keeping
from autopar.cost_models.sizes import itemsize
from autopar.cost_models.sizes import shards as parts
from autopar.ir.graph import Parameter
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An elementwise optimizer: `moments` tensors of the master's size, `accesses` of master-sized tensors in one step."""

    name: str
    moments: int
    accesses: int


def optimizer_named(name: str) -> Optimizer:
    """Accesses count the passes of torch's foreach implementation (each ``_foreach_*`` reads and writes memory once):
    adamw = decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4. An unknown name costs as adamw."""
    known = {
        "adamw": Optimizer("adamw", 2, 20),
        "adam": Optimizer("adam", 2, 18),
        "sgd": Optimizer("sgd", 0, 3),
        "momentum": Optimizer("momentum", 1, 6),
        "adagrad": Optimizer("adagrad", 1, 11),
        "rmsprop": Optimizer("rmsprop", 1, 11),
    }
    return known.get(name, Optimizer(name, 2, 20))


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Bytes per parameter. `stored_compute`: a copy in the compute dtype lives all step long beside the master (Megatron, the
    ZeRO paper); otherwise it is made for the forward and dropped after the backward (FSDP2), and needs none
    where the dtypes agree. `accesses` of master-sized tensors in the update, where the software's own count is known, and whether
    it makes copies of the master's size, and whether owners broadcast (see `Keeping`)."""

    compute_bytes: int
    master_bytes: int
    gradient_bytes: int
    moment_bytes: int
    stored_compute: bool = False
    accesses: float = 0.0
    update_copies: bool = True
    owners_broadcast: bool = False

    @staticmethod
    def of(precision: Precision, optimizer: Optimizer, keeping: Keeping | None = None) -> StatePolicy:
        """As `keeping` says; without it as autopar's own programs do."""
        master, keeping = itemsize(precision.master), keeping or Keeping()
        gradient = min(master, keeping.gradient_bytes or master)
        compute = itemsize(precision.compute)
        stored = keeping.stored_compute and compute != master
        moments = master * optimizer.moments
        broadcast = keeping.owners_broadcast
        return StatePolicy(compute, master, gradient, moments, stored, keeping.accesses, keeping.update_copies, broadcast)

    @staticmethod
    def zero_paper() -> StatePolicy:
        """fp16 weights 2, fp16 gradients 2, K = 12 (float32 master 4, momentum 4, variance 4): arXiv 1910.02054, section 3.1."""
        return StatePolicy(2, 4, 2, 8, stored_compute=True)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes on one device. `parameters`, `gradients` and `optimizer` are what they say (gradients from backward to step);
    `gathered` is unsharded weights in the compute dtype: with ZeRO-3 only around the block's own computing (two blocks at a
    time, with prefetch), otherwise from forward to backward. `unreduced` are the unsharded gradients while the block's backward
    runs, `reducing` the buffer that they are copied into to be reduced, which lives until the next block's are (FSDP2), or, where
    nothing is sharded (`in_place`), only until it replaces them. `accumulated` are the gradients between micro-batches. `updated`
    is one temporary of the master's size for every trainable parameter, `largest` for the largest of them. `standing` gradients
    are never freed: on CPUs their buffer is taken again in the next step (runtime `gradients.Bucket`).
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    gathered_is_transient: bool
    unreduced: float
    reducing: float = 0.0
    buffers: float = 0.0
    in_place: bool = False
    accumulated: float = 0.0
    updated: float = 0.0
    largest: float = 0.0
    standing: bool = False

    def __add__(self, other: StateMemory) -> StateMemory:
        """Both groups together."""
        first, second = (tuple(getattr(each, field.name) for field in fields(self)) for each in (self, other))
        return StateMemory(*(a or b if isinstance(a, bool) else a + b for a, b in zip(first, second, strict=True)))

    @property
    def reduced(self) -> float:
        """All that the reduction of the block's gradients holds."""
        return self.unreduced + self.reducing


def state_memory(
    elements: float,
    zero: int,
    shards: int,
    policy: StatePolicy,
    trainable: float | None = None,
    buffers: float = 0.0,
    largest: float = 0.0,
    tensors: int = 2,
    kind: str = "cuda",
) -> StateMemory:
    """`elements` parameters (the part of one device's model axes) in so many `tensors`, the largest of `largest` elements;
    `trainable` elements train. Over `shards` data ranks, on a device of this kind. One tensor alone is reduced where it is."""
    n = float(shards)
    trainable = elements if trainable is None else trainable
    cut = n if zero >= 1 else 1.0
    parameters = elements * policy.master_bytes / cut
    if policy.stored_compute:
        parameters += elements * policy.compute_bytes / (n if zero == 3 else 1.0)
    sharded = zero >= 1 and shards > 1
    separate = policy.compute_bytes != policy.master_bytes or sharded
    gathered = elements * policy.compute_bytes if separate and not policy.stored_compute else 0.0
    unreduced = reducing = 0.0
    if not policy.stored_compute:
        unreduced = trainable * policy.compute_bytes if sharded else 0.0
        reducing = trainable * policy.gradient_bytes if shards > 1 and (sharded or tensors > 1) else 0.0
    gradients = trainable * policy.gradient_bytes / (n if zero >= 2 or (zero == 1 and not policy.stored_compute) else 1.0)
    return StateMemory(
        parameters,
        gradients,
        trainable * policy.moment_bytes / cut,
        gathered,
        zero == 3,
        unreduced,
        reducing,
        buffers,
        not sharded,
        trainable * policy.gradient_bytes if zero == 1 else gradients,
        trainable * policy.master_bytes / cut * policy.update_copies,
        min(largest, trainable) * policy.master_bytes / cut,
        kind == "cpu" and not sharded and reducing > 0,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters that one block call owns, on one device of the model axes: counts of elements, buffers in bytes."""

    elements: float
    trainable: float
    tensors: int
    buffer_bytes: float = 0.0
    largest: float = 0.0


def group_of(parameters: Iterable[tuple[Parameter, Placements]], mesh: Mesh) -> Group:
    """Sums what the parameters (with their stored placements) leave on one device."""
    elements = trainable = buffers = largest = 0.0
    tensors = 0
    for parameter, placements in parameters:
        count = prod(size for size in parameter.value.shape if isinstance(size, int)) / parts(placements, mesh.sizes)
        if parameter.buffer:
            buffers += count * itemsize(parameter.value.dtype)
            continue
        elements += count
        tensors += 1
        trainable += count if parameter.trainable else 0.0
        largest = max(largest, count)
    return Group(elements, trainable, tensors, buffers, largest)


@dataclass(frozen=True, slots=True)
class StateCost:
    """One group under one ZeRO stage: `gather_*` before its forward and before its backward, `reduce_seconds` after its backward
    (all on the data axis, one collective each), the optimizer's share, and the bytes."""

    memory: StateMemory
    gather_forward_seconds: float
    gather_backward_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    gather_bytes: float
    reduce_bytes: float

    def __add__(self, other: StateCost) -> StateCost:
        """Both groups together, one collective after the other."""
        return StateCost(
            self.memory + other.memory,
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self) if field.name != "memory"),
        )


def state_cost(
    group: Group,
    zero: int,
    data: AxisLink,
    device: Device,
    precision: Precision,
    optimizer: Optimizer,
    policy: StatePolicy | None = None,
    across: AxisLink | None = None,
) -> StateCost:
    """`data` joins the ranks that share one copy of the state, `across` equal places of several copies, between which gradients
    are all-reduced (HSDP: Zhao et al., arXiv 2304.11277, section 3.2.2). ZeRO 0 all-reduces gradients; 1 and 2 gather once and
    reduce-scatter; 3 gathers again for the backward (arXiv 1910.02054, section 7: 2, 2, 2 and 3 times the parameters on the
    wire). Weights travel in the compute dtype, gradients in the master's."""
    policy = policy or StatePolicy.of(precision, optimizer)
    gather_bytes, reduce_bytes = group.elements * policy.compute_bytes, group.trainable * policy.gradient_bytes
    gather = 0.0
    if zero and gather_bytes and policy.owners_broadcast:
        gather = group.tensors * collective_seconds("broadcast", gather_bytes / group.tensors, data)
    elif zero and gather_bytes:
        gather = collective_seconds("all_gather", gather_bytes, data)
    reduce = collective_seconds("reduce_scatter" if zero else "all_reduce", reduce_bytes, data) if reduce_bytes else 0.0
    if across is not None and reduce_bytes:
        reduce += collective_seconds("all_reduce", reduce_bytes / (data.size if zero else 1), across)
    return StateCost(
        state_memory(
            group.elements,
            zero,
            data.size,
            policy,
            group.trainable,
            group.buffer_bytes,
            group.largest,
            group.tensors,
            device.kind,
        ),
        gather,
        gather if zero == 3 else 0.0,
        reduce,
        optimizer_seconds(group, zero, data.size, device, precision, optimizer, policy.accesses),
        gather_bytes if zero else 0.0,
        reduce_bytes,
    )


def optimizer_seconds(
    group: Group,
    zero: int,
    data_size: int,
    device: Device,
    precision: Precision,
    optimizer: Optimizer,
    accesses: float = 0.0,
) -> float:
    """Streaming of the local shard, `accesses` times (0: the optimizer's own count). On a CPU each tensor is updated by itself,
    and each pass over it (about two accesses) has its own cost."""
    count = group.trainable / (data_size if zero else 1)
    traffic = count * (accesses or optimizer.accesses) * itemsize(precision.master)
    seconds = traffic / (device.bandwidth_bytes_per_second * device.bandwidth_fraction)
    launches = group.tensors * optimizer.accesses / 2 if device.kind == "cpu" else 0.0
    return seconds + launches * (device.update_seconds or device.launch_seconds)
