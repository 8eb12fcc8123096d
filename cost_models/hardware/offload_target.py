"""Where the optimizer's state of a plan lies between steps, by the cluster's file."""

from __future__ import annotations

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import OffloadTarget
from autopar.errors import PlanError
from autopar.ir.plan import OFFLOAD_DEVICES, Precision


def offload_target(cluster: Cluster, precision: Precision) -> OffloadTarget | None:
    """The host memory or NVMe of one device; None where the state stays on the device. PlanError where the cluster describes
    none of it."""
    where = precision.offload_optimizer
    if not where:
        return None
    if where not in OFFLOAD_DEVICES:
        raise PlanError(f"offload_optimizer={where[:40]}: write one of {', '.join(OFFLOAD_DEVICES)}, or leave it out")
    target = cluster.host if where == "cpu" else cluster.nvme
    if target is None:
        key = "host" if where == "cpu" else "nvme"
        raise PlanError(
            f"the description of {cluster.name} has no {key}, so no optimizer state can be offloaded to it: add `{key}:`, or "
            "plan without offload_optimizer"
        )
    return target
