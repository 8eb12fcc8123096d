"""The meshes of the grid: every factorization of the cluster into a data axis and up to two model axes, the first of which may be
the expert axis, which shards the batch too (`EXPERT_AXIS`).

Model axes together span at most `WIDEST_NODES` nodes, or as many devices as a small batch leaves. The data axis is outermost and
the last axis joins neighbouring ranks; so both orders of two model axes are two mappings onto the links, but inside a node,
whose links are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import BatchError, ClusterError
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS, MODEL_AXES, Axis, Mesh
from autopar.solve.space.force import AXES, check_degrees

WIDEST_NODES = 4
"""Nodes that model axes may span: wider ones spend their time on the network between nodes."""

WIDEST_DEVICES = 16
"""Devices that model axes may span whatever the nodes are."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def mesh_of(dp: int, *model: int, ep: int = 1) -> Mesh:
    """Return the mesh without model axes of one rank; the data axis is always there. The last axis joins neighbouring ranks."""
    sizes = [size for size in model if size > 1]
    names = MODEL_AXES[: len(sizes)]
    experts = (Axis(EXPERT_AXIS, ep),) if ep > 1 else ()
    return Mesh((Axis(DATA_AXIS, dp), *experts, *(Axis(name, size) for name, size in zip(names, sizes, strict=True))))


def check_axes(force: Mapping[str, int], size: int, batch: int) -> None:
    """Raise AutoparError where a degree is none, or does not divide the cluster's devices or the batch."""
    check_degrees(force)
    for name, value in force.items():
        if name in AXES and size % value:
            raise ClusterError(f"{name}={value} does not divide the {size} devices of the cluster: force a divisor of {size}")
    if batch % force.get(DATA_AXIS, 1):
        raise BatchError(f"the global batch {batch} does not divide by dp={force[DATA_AXIS]}: make it a multiple of that")


def meshes(
    size: int, batch: int, force: Mapping[str, int], node_size: int = 0, experts: bool = False, ordered: bool = False
) -> list[Mesh]:
    """Every mesh that the batch and `force` allow: one model axis before two, small before large. `ordered`: two model axes are
    no other's mirror inside a node either, because pins name them.

    With `experts` the model axes are ``ep``, ``tp`` where ``ep`` cannot shard the batch, and both on few devices or forced; else
    ``tp`` or two of them. A forced ``tp`` or ``ep`` alone means that there is no other model axis. BatchError or ClusterError
    where nothing is left.
    """
    check_axes(force, size, batch)
    if experts and "tp2" in force:
        raise ClusterError(f"tp2={force['tp2']} cannot be forced beside experts: force ep=1 too, or ep and tp")
    every = list(_with_experts(size, force) if experts or force.get(EXPERT_AXIS, 1) > 1 else _factorizations(size, force))
    if not every:
        degrees = ", ".join(f"{name}={value}" for name, value in force.items() if name in AXES)
        raise ClusterError(f"{degrees} does not multiply to the {size} devices of the cluster: change one of them")
    allowed = [mesh for mesh in every if batch % mesh.size_of(DATA_AXIS) == 0]
    if not allowed:
        fewest = min(mesh.size_of(DATA_AXIS) for mesh in every)
        raise BatchError(f"the global batch {batch} divides by no data degree of these meshes: make it a multiple of {fewest}")
    if node_size and not any(name in force for name in AXES):
        widest = max(WIDEST_NODES * node_size, WIDEST_DEVICES, min(mesh.size // mesh.size_of(DATA_AXIS) for mesh in allowed))
        allowed = [mesh for mesh in allowed if mesh.size // mesh.size_of(DATA_AXIS) <= widest]
        allowed = [mesh for mesh in allowed if ordered or not _is_same_in_node(mesh, node_size)]
    return sorted(allowed, key=lambda mesh: (len(mesh.axes), size // mesh.size_of(DATA_AXIS), mesh.sizes[1:]))


def _is_same_in_node(mesh: Mesh, node_size: int) -> bool:
    """Return whether its two model axes, the smaller one first, are in the grid in the other order over the same links."""
    sizes = mesh.sizes[1:]
    inside = len(sizes) == 2 and EXPERT_AXIS not in mesh.names and node_size % (sizes[0] * sizes[1]) == 0
    return inside and sizes[0] < sizes[1]


def _products(size: int, force: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """Yield the degrees of the data axis and two others whose product is `size`."""
    for dp in divisors(size):
        if dp == force.get(DATA_AXIS, dp):
            yield from ((dp, first, size // dp // first) for first in divisors(size // dp))


def _factorizations(size: int, force: Mapping[str, int]) -> Iterator[Mesh]:
    for dp, tp, tp2 in _products(size, force):
        wanted = force.get("tp", tp), force.get("tp2", 1 if "tp" in force else tp2)
        if (tp, tp2) == wanted and not tp == 1 < tp2:
            yield mesh_of(dp, tp, tp2)


def _with_experts(size: int, force: Mapping[str, int]) -> Iterator[Mesh]:
    for dp, ep, tp in _products(size, force):
        wanted_ep = force.get(EXPERT_AXIS, 1 if "tp" in force else ep)
        wanted_tp = force.get("tp", 1 if EXPERT_AXIS in force else tp)
        wide = ep > 1 < tp and size > WIDEST_DEVICES and not {EXPERT_AXIS, "tp"} & set(force)
        if (ep, tp) == (wanted_ep, wanted_tp) and force.get("tp2", 1) == 1 and not wide:
            yield mesh_of(dp, tp, ep=ep)
