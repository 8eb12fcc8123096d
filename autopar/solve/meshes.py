"""The declared grid of meshes: every factorization of the cluster into a data axis and up to two model axes.

Model axes together join at most `WIDEST_NODES` nodes (on a cluster of one: everything), or as many devices as a small batch
leaves.
The data axis is outermost and the last axis joins neighbours; so both orders of two model axes are two mappings onto the links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import BatchError, ClusterError
from autopar.ir.mesh import DATA_AXIS, MODEL_AXES, Axis, Mesh

FORCIBLE = (DATA_AXIS, *MODEL_AXES, "pp", "virtual", "schedule", "zero", "zero_group", "micro")

WIDEST_NODES = 4
"""Wider model axes spend their time on the network between nodes."""

WIDEST_DEVICES = 16
"""So many devices are not too wide, whatever the nodes."""


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def mesh_of(dp: int, *model: int) -> Mesh:
    """Axes of one rank are left out, the data axis never. The last axis joins neighbouring ranks."""
    sizes = [size for size in model if size > 1]
    names = MODEL_AXES[: len(sizes)]
    return Mesh((Axis(DATA_AXIS, dp), *(Axis(name, size) for name, size in zip(names, sizes, strict=True))))


def check_force(force: Mapping[str, int], size: int, batch: int) -> None:
    """One line for everything that cannot be."""
    for name, value in force.items():
        if name not in FORCIBLE:
            raise ClusterError(f"cannot force {name}={value}: write one of {', '.join(FORCIBLE)}")
        if name == "zero" and value not in (0, 1, 2, 3):
            raise ClusterError(f"zero={value} is not a state sharding: write zero=0, 1, 2 or 3")
        if name == "micro" and value < 1:
            raise ClusterError(f"micro={value} is no batch: write 1 or more")
        if name in (DATA_AXIS, *MODEL_AXES) and (value < 1 or size % value):
            raise ClusterError(f"{name}={value} does not divide the {size} devices of the cluster: force a divisor of {size}")
    if batch % force.get(DATA_AXIS, 1):
        raise BatchError(f"the global batch {batch} does not divide by dp={force[DATA_AXIS]}: make it a multiple of that")


def meshes(size: int, batch: int, force: Mapping[str, int], node_size: int = 0) -> list[Mesh]:
    """Every mesh that the batch and `force` allow, the likely ones first: one model axis before two, small before large.

    A forced ``tp`` alone means that there is no second model axis. BatchError or ClusterError where nothing is left.
    """
    check_force(force, size, batch)
    every = list(_factorizations(size, force))
    if not every:
        wanted = ", ".join(f"{name}={value}" for name, value in force.items() if name in (DATA_AXIS, *MODEL_AXES))
        raise ClusterError(f"{wanted} does not multiply to the {size} devices of the cluster: change one of them")
    found = [mesh for mesh in every if batch % mesh.size_of(DATA_AXIS) == 0]
    if not found:
        fewest = min(mesh.size_of(DATA_AXIS) for mesh in every)
        raise BatchError(f"the global batch {batch} divides by no data degree of these meshes: make it a multiple of {fewest}")
    if node_size and not any(name in force for name in (DATA_AXIS, *MODEL_AXES)):
        widest = max(WIDEST_NODES * node_size, WIDEST_DEVICES, min(mesh.size // mesh.size_of(DATA_AXIS) for mesh in found))
        found = [mesh for mesh in found if mesh.size // mesh.size_of(DATA_AXIS) <= widest]
    return sorted(found, key=lambda mesh: (len(mesh.axes), size // mesh.size_of(DATA_AXIS), mesh.sizes[1:]))


def _factorizations(size: int, force: Mapping[str, int]) -> Iterator[Mesh]:
    for dp in divisors(size):
        if dp != force.get(DATA_AXIS, dp):
            continue
        rest = size // dp
        for tp in divisors(rest):
            tp2 = rest // tp
            if tp == 1 and tp2 > 1:
                continue
            if tp != force.get("tp", tp) or tp2 != force.get("tp2", 1 if "tp" in force else tp2):
                continue
            yield mesh_of(dp, tp, tp2)
