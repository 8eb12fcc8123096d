"""When a group of parameters is gathered, reduced and accumulated in a step of several micro-batches, in seconds.

ZeRO-3 gathers before every forward and backward; ZeRO-1 and 2 gather once, before the first. ZeRO-2 and 3 reduce behind every
micro-batch, since no rank has room for more than its shard of the gradient; ZeRO-0 and 1 add gradients up where they are and
reduce behind the last one (arXiv 1910.02054, sections 5 and 7; FSDP2's ``set_requires_gradient_sync``).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.formulas import formula
from autopar.cost_models.hardware import Device
from autopar.cost_models.sizes import itemsize
from autopar.cost_models.state import StateCost
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds on the data axis of one group: before the first forward and before each later one, before each backward, behind
    each backward but the last and behind the last. `accumulate_seconds` is the main stream's, in each backward: it adds
    the gradient to those of the micro-batches before (behind the last, it is what hands the sum out)."""

    gather_first: float
    gather_later: float
    gather_backward: float
    reduce_each: float
    reduce_last: float
    accumulate_seconds: float
    optimizer_seconds: float

    @staticmethod
    def of(cost: StateCost, zero: int, shards: int, device: Device, precision: Precision, micro_batches: int) -> Traffic:
        """`shards` are the ranks of the data axis that share one copy of the state."""
        again = zero == 3
        return Traffic(
            cost.gather_forward_seconds,
            cost.gather_forward_seconds if again else 0.0,
            cost.gather_backward_seconds,
            cost.reduce_seconds if zero >= 2 else 0.0,
            cost.reduce_seconds,
            accumulate_seconds(cost, zero, shards, device, precision) if micro_batches > 1 else 0.0,
            cost.optimizer_seconds,
        )

    def data_axis_seconds(self, micro_batches: int) -> float:
        """Communication of a whole step, hidden or not."""
        later = micro_batches - 1
        gathers = self.gather_first + later * self.gather_later + micro_batches * self.gather_backward
        return gathers + later * self.reduce_each + self.reduce_last


def accumulate_seconds(cost: StateCost, zero: int, shards: int, device: Device, precision: Precision) -> float:
    """One pass over memory: the new gradient is read (unreduced, in the compute dtype; a reduced shard, in the master's), the sum
    is read and written in the master's dtype. `cost.reduce_bytes` are the trainable elements in the master's dtype."""
    parts = shards if zero >= 2 else 1
    compute, master = itemsize(precision.compute), itemsize(precision.master)
    read = 1.0 if parts > 1 else compute / master
    rate = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    return float(formula("step.accumulate").function(cost.reduce_bytes, read, parts, rate))
