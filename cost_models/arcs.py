"""Seconds of one conversion of a value between placements that differ on one mesh axis (the table of DESIGN section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLink, Cluster, Device, links_of_axis
from autopar.cost_models.sizes import shards, value_bytes
from autopar.ir.graph import Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, Shard
from autopar.rules.conversions import COLLECTIVES, changed_axis, conversion


@dataclass(frozen=True, slots=True)
class ArcCost:
    """A conversion: communication on `axis` and local copies (`*_local_seconds`), forward and backward. `*_bytes` is the
    unsharded tensor as the group sees it, 0 where nothing is sent."""

    axis: int
    forward_comm_seconds: float
    backward_comm_seconds: float
    forward_local_seconds: float
    backward_local_seconds: float
    forward_kind: str | None
    backward_kind: str | None
    full_bytes: float

    @property
    def forward_seconds(self) -> float:
        return self.forward_comm_seconds + self.forward_local_seconds

    @property
    def backward_seconds(self) -> float:
        return self.backward_comm_seconds + self.backward_local_seconds


def _copied_bytes(kind: str | None, full_bytes: float, size: int, contiguous: bool) -> float:
    """Memory traffic beside the wire. Along dimension 0 the collectives read and write in place; along another one the gathered
    (or to be scattered) tensor is rearranged once, read and written."""
    part = full_bytes / size
    match kind:
        case "all_gather" | "reduce_scatter":
            return 0.0 if contiguous else 2 * full_bytes
        case "all_to_all":
            return 4 * part
        case "slice":
            return 2 * part
        case "pad":
            return full_bytes + part
        case "mask" | "scale":
            return 2 * full_bytes
        case _:
            return 0.0


def _side(kind: str | None, full_bytes: float, link: AxisLink, device: Device, contiguous: bool) -> tuple[float, float]:
    comm = collective_seconds(kind, full_bytes, link) if kind in COLLECTIVES and kind is not None else 0.0
    copied = _copied_bytes(kind, full_bytes, link.size, contiguous)
    local = (
        max(device.launch_seconds, copied / (device.bandwidth_bytes_per_second * device.bandwidth_fraction)) if copied else 0.0
    )
    return comm, local


def arc_cost(value: Value, source: Placements, target: Placements, mesh: Mesh, batch: int, cluster: Cluster) -> ArcCost:
    """The cost of converting `value` (global shape, global batch). ValueError where the two differ in not exactly one axis, or
    have no direct conversion."""
    axis = changed_axis(source, target)
    found = conversion(source[axis], target[axis], value.differentiable)
    if found is None:
        raise ValueError(f"no conversion of {value.name} from {source[axis]} to {target[axis]}")
    size = mesh.sizes[axis]
    if size == 1:
        return ArcCost(axis, 0.0, 0.0, 0.0, 0.0, found.forward, found.backward, 0.0)
    other = shards((*source[:axis], *source[axis + 1 :]), (*mesh.sizes[:axis], *mesh.sizes[axis + 1 :]))
    full_bytes = value_bytes(value, batch) / other
    link = links_of_axis(cluster, mesh, axis)
    contiguous = all(place.dim == 0 for place in (source[axis], target[axis]) if isinstance(place, Shard))
    forward_comm, forward_local = _side(found.forward, full_bytes, link, cluster.device, contiguous)
    backward_comm, backward_local = _side(found.backward, full_bytes, link, cluster.device, contiguous)
    return ArcCost(axis, forward_comm, backward_comm, forward_local, backward_local, found.forward, found.backward, full_bytes)
