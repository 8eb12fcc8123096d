"""Seconds of one placement conversion (redistribute): a value changes its placement on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Device
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.tensors.sizes import shard_count, value_bytes
from autopar.ir.graph import Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, Shard
from autopar.rules.conversions import COLLECTIVES, axis_conversion, changed_axis


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """The cost of a placement conversion: communication on `axis` and local copies (`*_local_seconds`), forward and backward.
    `*_bytes` is the unsharded tensor as the group sees it, 0 where nothing is sent."""

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
    """Return the memory traffic of local copies. Along dimension 0 the collectives read and write in place; along another one the
    gathered (or to be scattered) tensor is rearranged once, read and written."""
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


def partition_seconds(full_bytes: float, link: AxisLink, device: Device) -> tuple[float, float]:
    """Return the seconds of a saved tensor of which each rank of an axis saves one part: of the copy of that in the forward, and
    of the all-gather in the backward."""
    return _side("slice", full_bytes, link, device, True)[1], _side("all_gather", full_bytes, link, device, True)[0]


def conversion_cost(
    value: Value, source: Placements, target: Placements, mesh: Mesh, batch: int, cluster: Cluster
) -> ConversionCost:
    """Return the cost of converting `value` (global shape, global batch). ValueError where the two differ in not exactly one
    axis, or have no direct conversion."""
    axis = changed_axis(source, target)
    conversion = axis_conversion(source[axis], target[axis], value.differentiable)
    if conversion is None:
        raise ValueError(f"no conversion of {value.name} from {source[axis]} to {target[axis]}")
    full_bytes, forward, backward = 0.0, (0.0, 0.0), (0.0, 0.0)
    if mesh.sizes[axis] > 1:
        other = shard_count((*source[:axis], *source[axis + 1 :]), (*mesh.sizes[:axis], *mesh.sizes[axis + 1 :]))
        full_bytes = value_bytes(value, batch) / other
        link = links_of_axis(cluster, mesh, axis)
        contiguous = all(place.dim == 0 for place in (source[axis], target[axis]) if isinstance(place, Shard))
        forward = _side(conversion.forward, full_bytes, link, cluster.device, contiguous)
        backward = _side(conversion.backward, full_bytes, link, cluster.device, contiguous)
    return ConversionCost(
        axis=axis,
        forward_comm_seconds=forward[0],
        backward_comm_seconds=backward[0],
        forward_local_seconds=forward[1],
        backward_local_seconds=backward[1],
        forward_kind=conversion.forward,
        backward_kind=conversion.backward,
        full_bytes=full_bytes,
    )
