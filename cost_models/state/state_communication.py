"""The seconds in which a group of parameters is gathered, reduced and accumulated in a step of several micro-batches.

ZeRO-3 all-gathers before every forward and backward; ZeRO-1 and 2 once, before the first forward. ZeRO-2 and 3 reduce after every
micro-batch, since a rank holds no more than its shard of the gradients; ZeRO-0 and 1 accumulate unreduced gradients and reduce
after the last micro-batch (arXiv 1910.02054, sections 5 and 7; FSDP2's ``set_requires_gradient_sync``).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.state.state_cost import StateCost
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.plan import Precision


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
