"""Optimizer state that lies in host memory, or on NVMe, between steps: seconds of its update, and the bytes of it that are on the
device meanwhile.

The update is that of the runtime (`runtime/state/offload_optimizer.py`): parameters in parts, the state of a part copied to the
device, updated there, and copied back, while that of the next part is on its way. All copies share one CUDA stream, so that
reading and writing add up: an update takes

    max(update on the device, state / read bandwidth + state / write bandwidth)

where there are several parts; one part alone takes the sum, which is at most one part's update longer. (ZeRO-Infinity, arXiv
2104.07857, section 4: what bounds an offloaded optimizer is the bandwidth to where its state lies, which is read and written once
a step; NVMe is the same with a lower bandwidth.) On a CPU nothing overlaps: they add up.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device, OffloadTarget
from autopar.cost_models.state.state_memory import StateMemory
from autopar.errors import PlanError
from autopar.ir.plan import Precision

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
