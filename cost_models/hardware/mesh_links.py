"""The network links that the process groups of a mesh axis run over."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd, prod

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.errors import ClusterError
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh

_SYMMETRIC_GENERATIONS = ("hopper", "blackwell")
_SYMMETRIC_LINK = "nvlink"
_MOST_DEVICES_OF_A_HOST = 8
_RACK_DEVICES = ("GB200", "GB300")


def check_mesh(cluster: Cluster, mesh: Mesh) -> None:
    """Raise ClusterError unless the mesh uses every device."""
    if mesh.size != cluster.size:
        raise ClusterError(
            f"the mesh {mesh} has {mesh.size} ranks, but {cluster.name} has {cluster.size} devices: let the axes multiply to it"
        )


@lru_cache(maxsize=4096)
def links_of_axis(cluster: Cluster, mesh: Mesh, axis: int) -> AxisLink:
    """Return the link levels that the groups of `axis` use. Ranks are row-major: neighbours on the last axis are neighbours in a
    node.

    A group steps through ranks in strides of ``prod(sizes after axis)``; a level that joins D devices (but not all) holds
    ``gcd(size, D / stride)`` of its members, the rest is joined further out. Where a stride does not divide D the members are
    taken to lie apart (a group that straddles nodes runs at the speed of its slowest link). A torus counts as one level for
    each dimension.
    """
    check_mesh(cluster, mesh)
    stride, size = prod(mesh.sizes[axis + 1 :]), mesh.sizes[axis]
    levels: list[Level] = []
    inside, beneath = 1, 1
    links = torus_as_rings(cluster.links)
    for index, link in enumerate(links):
        everyone = index == len(links) - 1 or link.devices >= cluster.size
        reach = size if everyone else gcd(size, link.devices // stride) if link.devices % stride == 0 else 1
        width = reach // inside
        if width > 1:
            levels.append(level_of(link, width, link.devices // beneath))
            inside = reach
        beneath = link.devices
    inner = {link.name for link in links[:1]} if len(links) > 1 else set()
    algorithms = cluster.algorithms
    if all(level.link.name in inner for level in levels) and algorithms != ("tree",):
        algorithms = tuple(name for name in algorithms if name != "tree")  # in a node it is a chain: never better than a ring
    return AxisLink(size, tuple(levels), cluster.device.launch_seconds, algorithms)


def shares_data_links(cluster: Cluster, mesh: Mesh, axis: int) -> bool:
    """Return whether collectives on `axis` use a physical link of the data axis, so that those of state have to wait for them."""
    return links_of_axis(cluster, mesh, mesh.index(DATA_AXIS)).shares(links_of_axis(cluster, mesh, axis))


def has_symmetric_memory(cluster: Cluster) -> bool:
    """Return whether devices of a host have each other's memory in their address space, and engines that copy from it beside
    products: Hopper and later with NVLink, but for racks, where NVLink joins hosts of four devices."""
    devices = [each.device for each in cluster.groups] or [cluster.device]
    inner = {each.links[0] for each in cluster.groups} or {*cluster.links[:1]}
    known = all(each.generation in _SYMMETRIC_GENERATIONS and not each.name.startswith(_RACK_DEVICES) for each in devices)
    return known and all(link.name == _SYMMETRIC_LINK and 1 < link.devices <= _MOST_DEVICES_OF_A_HOST for link in inner)


def async_tp_axes(cluster: Cluster, mesh: Mesh) -> tuple[int, ...]:
    """Return the model axes on which collectives run in pieces with products, where the software does so: those within a node
    with symmetric memory, and by messages those over one switch, on which a device has all of its bandwidth towards each of the
    others."""
    if not cluster.overlap.async_tensor_parallel:
        return ()
    axes = (axis for axis, each in enumerate(mesh.axes) if each.name != DATA_AXIS and each.size > 1)
    levels = {axis: links_of_axis(cluster, mesh, axis).levels for axis in axes}
    symmetric, sends = has_symmetric_memory(cluster), cluster.overlap.async_tp_by_messages

    def runs_beside(found: tuple[Level, ...]) -> bool:
        inside = symmetric and all(level.link.name == _SYMMETRIC_LINK for level in found)
        return inside or (sends and len(found) == 1 and found[0].link.kind == "switch")

    return tuple(axis for axis, found in levels.items() if runs_beside(found))


def links_of_group(cluster: Cluster, mesh: Mesh, axis: int, group: int) -> AxisLink:
    """Return the links among `group` neighbours on one axis. ValueError where `group` does not divide the axis."""
    return links_of_axis(cluster, _split(mesh, axis, group), axis + 1)


def links_across(cluster: Cluster, mesh: Mesh, axis: int, group: int) -> AxisLink:
    """Return the links that members of equal place in such groups use between the groups."""
    return links_of_axis(cluster, _split(mesh, axis, group), axis)


def _split(mesh: Mesh, axis: int, group: int) -> Mesh:
    """Return the mesh with one axis as (groups, members)."""
    whole = mesh.axes[axis]
    if whole.size % group:
        raise ValueError(f"groups of {group} do not divide {whole.name}={whole.size}")
    parts = Axis(f"{whole.name}_groups", whole.size // group), Axis(whole.name, group)
    return Mesh((*mesh.axes[:axis], *parts, *mesh.axes[axis + 1 :]))


def torus_as_rings(links: tuple[Link, ...]) -> list[Link]:
    """Return the links, with each torus as rings, one for each dimension."""
    out: list[Link] = []
    for link in links:
        inside = out[-1].devices if out else 1
        for index, width in enumerate(link.dimensions if link.kind == "torus" else ()):
            inside *= width
            out.append(replace(link, name=f"{link.name}{index}", devices=inside, kind="ring", dimensions=()))
        if link.kind != "torus":
            out.append(link)
    return out


def level_of(link: Link, width: int, members: int) -> Level:
    """Return the level of `width` of the `members` of a link. Of a full mesh they have only the cables between them; a whole ring
    is used in both directions, a part of one has a first and a last member that have only one neighbour."""
    share = 1.0 / link.oversubscription
    if link.kind == "mesh":
        share *= (width - 1) / max(1, members - 1)
    elif link.kind == "ring" and width == members > 2:
        share *= 2.0
    peer = link.bandwidth_bytes_per_second / link.oversubscription / (max(1, members - 1) if link.kind == "mesh" else 1)
    return Level(link.scaled(share), width, peer)
