"""Clusters: devices and link levels, read from names, YAML or plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.cost_models import cluster_parts as parts
from autopar.cost_models.axes import check_mesh, links_across, links_of_axis, links_of_group
from autopar.cost_models.cluster_file import GIB, plain, preset_path, presets
from autopar.cost_models.devices import AxisLink, Device, Level, Link, NodeGroup, Store
from autopar.cost_models.expert_load import ExpertLoad, load
from autopar.cost_models.keeping import Keeping
from autopar.cost_models.overlap import Overlap
from autopar.cost_models.slowest import slowest, slowest_device, slowest_note
from autopar.errors import ClusterError

__all__ = [
    "GIB",
    "AxisLink",
    "Cluster",
    "Device",
    "Level",
    "Link",
    "NodeGroup",
    "Store",
    "check_mesh",
    "links_across",
    "links_of_axis",
    "links_of_group",
    "preset_path",
    "presets",
    "read",
    "scaled",
]


def _lists(data: Any) -> Any:
    """Tuples as lists, as JSON and YAML give them back."""
    if isinstance(data, dict):
        return {name: _lists(value) for name, value in data.items()}
    return [_lists(each) for each in data] if isinstance(data, (list, tuple)) else data


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, and links from the innermost level outwards. The last level joins everything.

    Where node groups of different devices make up the cluster (`groups`), `device` is what a synchronous step feels: every rank
    waits for the slowest, and the same program must fit everywhere. So it has the slowest matrix products, the slowest memory,
    the smallest capacity, and of each link level the smallest bandwidth and the largest latency. Work is not dealt out unevenly.

    `host` and `nvme` are where a device can offload to (None: unknown), `algorithms` is what the collective library chooses from,
    `overlap` what the software of the step hides, `keeping` how it keeps the state, `expert_load` how evenly routers deal tokens
    to experts. `note` is what to know of the figures: when they were measured, how sure they are, which device's they are.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    size: int
    host: Store | None = None
    nvme: Store | None = None
    algorithms: tuple[str, ...] = ("ring", "tree", "switch")
    groups: tuple[NodeGroup, ...] = ()
    overlap: Overlap = Overlap()
    note: str = ""
    keeping: Keeping = Keeping()
    expert_load: ExpertLoad = ExpertLoad()

    def __hash__(self) -> int:
        return hash((self.name, self.size, self.device.name))

    @staticmethod
    def parse(text: str, cache: Path | None = None) -> Cluster:
        """``preset:nodes`` (``dgx-h100:8``), several of them joined by ``+``, ``local:processes``, or the path of a YAML file.
        ClusterError where it is none.

        ``local`` is measured on this machine, once, when `cache` names a folder that keeps the result; without one it is the
        conservative description beside this file, so that nothing depends on the hour.
        """
        if text.endswith((".yaml", ".yml")):
            return read(Path(text), text)
        if "+" in text:
            return mixed(tuple(Cluster.parse(part.strip()) for part in text.split("+")), text)
        preset, _, count = text.partition(":")
        if preset not in presets():
            raise ClusterError(
                f"no cluster {preset!r}: write one of {', '.join(presets())} with :nodes, or the path of a .yaml file"
            )
        if not (count or "1").isdigit() or int(count or "1") < 1:
            raise ClusterError(f"cluster {text!r}: {count!r} is not a number of nodes; write {preset}:1")
        if preset == "local":
            local: Any = import_module("autopar.cost_models.local")  # which needs this module first
            found: Cluster = local.described(int(count or "1")) if cache is None else local.cached(int(count or "1"), cache)
            return found
        return scaled(read(preset_path(preset), preset), text, int(count or "1"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_dict`."""
        data = asdict(self)
        for each in (data, *data["groups"]):
            for key in ("peak", "measured_peak"):
                each["device"][key] = dict(each["device"][key])
            for link in each["links"]:
                link["factors"] = {kind: list(pair) for kind, *pair in link["factors"]}
        plain: dict[str, Any] = _lists(data)
        return plain

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """A cluster from plain data. ClusterError tells the path of what is missing or wrong, and how to mend it."""
        readers: dict[str, Any] = {
            "device": parts.device,
            "links": parts.listed(parts.link),
            "host": parts.optional(parts.store),
            "nvme": parts.optional(parts.store),
            "algorithms": parts.listed(parts.algorithm),
            "groups": parts.listed(parts.group),
            "overlap": parts.overlap,
            "keeping": parts.keeping,
            "expert_load": load,
        }
        cluster: Cluster = parts.made(Cluster, data, "", readers)
        parts.check(cluster.device, cluster.links, cluster.size, cluster.algorithms)
        return cluster


def read(path: Path, name: str) -> Cluster:
    """One description from a YAML file; units may be in the keys (``memory_gib``). Instead of a device it may have `groups`, each
    with a `cluster` as `Cluster.parse` takes it; what else is in the file (links, host, nvme) then replaces what these have in
    common. ClusterError names file and fault."""
    data = plain(path)
    try:
        if "groups" in data and "device" not in data:
            clusters = tuple(Cluster.parse(str(group["cluster"])) for group in data.pop("groups"))
            return Cluster.from_dict({**mixed(clusters, name).to_dict(), **data})
        alone: dict[str, Any] = {"links": []} if data.get("size", 1) == 1 else {}
        return Cluster.from_dict({"name": name, "size": 1, **alone, **data})
    except ClusterError as error:
        raise ClusterError(f"{path.name}: {error}") from None
    except (KeyError, TypeError) as error:
        raise ClusterError(f"{path.name}: each of groups needs a cluster ({error})") from None


def scaled(one: Cluster, name: str, nodes: int) -> Cluster:
    """`nodes` copies of a one-node description: the last link joins them all."""
    size = one.size * nodes
    last = replace(one.links[-1], devices=max(size, one.links[-1].devices))
    return replace(one, name=name, size=size, links=(*one.links[:-1], last))


def mixed(clusters: tuple[Cluster, ...], name: str) -> Cluster:
    """Clusters side by side, joined by their last level: the smallest of each figure counts, see `Cluster`. ClusterError where
    their nodes are not of one size."""
    if len({tuple(link.devices for link in each.links[:-1]) for each in clusters}) > 1:
        raise ClusterError(f"cluster {name}: the parts must have equally many devices in a node; describe it in a .yaml file")
    size = sum(each.size for each in clusters)
    links = tuple(slowest(same, {"devices", "dimensions"}) for same in zip(*(each.links for each in clusters), strict=True))
    stores: dict[str, Any] = {}
    for key in ("host", "nvme"):
        found = [store for each in clusters if (store := getattr(each, key)) is not None]
        stores[key] = slowest(found) if len(found) == len(clusters) else None
    whole = Cluster(
        name,
        slowest_device([each.device for each in clusters]),
        (*links[:-1], replace(links[-1], devices=size)),
        size,
        **stores,
        algorithms=tuple(way for way in clusters[0].algorithms if all(way in each.algorithms for each in clusters)),
        groups=tuple(NodeGroup(each.device, each.links, each.size) for each in clusters),
        note=slowest_note([(each.size, each.device) for each in clusters]),
    )
    parts.check(whole.device, whole.links, whole.size, whole.algorithms)
    return whole
