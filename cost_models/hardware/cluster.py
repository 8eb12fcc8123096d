"""The `Cluster`, the hardware (and its software) that a plan is priced on, read from preset names, YAML files or plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.cost_models.hardware import cluster_parser as parser
from autopar.cost_models.hardware.allocator import MEMORY_MARGIN
from autopar.cost_models.hardware.bottleneck import bottleneck_device, bottleneck_note, bottleneck_of
from autopar.cost_models.hardware.cluster_file import preset_path, presets, read_yaml, with_base
from autopar.cost_models.hardware.device_specs import Device, Link, NodeGroup, OffloadTarget
from autopar.cost_models.hardware.software_traits import Overlap, StateLayout
from autopar.cost_models.hardware.stack_entries import TunedRates, parse_tuned, planner_fractions
from autopar.cost_models.hardware.workload import DocumentLengths, ExpertLoad, parse_document_lengths, parse_expert_load
from autopar.errors import ClusterError


def _lists(data: Any) -> Any:
    """Return tuples as lists, as JSON and YAML give them back."""
    if isinstance(data, dict):
        return {name: _lists(value) for name, value in data.items()}
    return [_lists(each) for each in data] if isinstance(data, (list, tuple)) else data


def _measured_entry(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A table as `cluster_parser.parse_measured` reads it."""
    table = measured["table"]
    by_bytes = {int(size): seconds for size, seconds in zip(table["sizes"], table["seconds"], strict=True)}
    return {"kind": measured["kind"], "width": measured["width"], "by_bytes_seconds": by_bytes}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of `size` devices, and `links` from the innermost level (inside a node) outwards. The last level joins
    everything.

    groups: the node groups of a heterogeneous cluster. Then `device` and `links` are the bottleneck of a synchronous step, in
        which every rank waits for the slowest and the same program must fit everywhere: the slowest matrix products, the slowest
        and the smallest memory, and of each link level the smallest bandwidth and the largest latency.
    host, nvme: where a device can offload to (None: unknown).
    algorithms: what the collective library chooses from.
    overlap: which communication the software of the step overlaps with compute.
    state_layout: which copies of weights and gradients that software holds.
    expert_load: how evenly routers distribute tokens over experts.
    document_lengths: documents of packed sequences.
    note: provenance of the figures: when they were measured, how reliable they are, which device's they are.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    size: int
    host: OffloadTarget | None = None
    nvme: OffloadTarget | None = None
    algorithms: tuple[str, ...] = ("ring", "tree", "switch")
    groups: tuple[NodeGroup, ...] = ()
    overlap: Overlap = Overlap()
    note: str = ""
    state_layout: StateLayout = StateLayout()
    expert_load: ExpertLoad = ExpertLoad()
    document_lengths: DocumentLengths = DocumentLengths()

    def __hash__(self) -> int:
        return hash((self.name, self.size, self.device.name))

    @staticmethod
    def parse(
        text: str, cache: Path | None = None, processes: int = 0, progress: Callable[[str], object] | None = None
    ) -> Cluster:
        """Parse ``preset:nodes`` (``dgx-h100:8``), several of them joined by ``+``, ``local:processes``, or the path of a YAML
        file. A preset without a number is one node, or has a device for each of the `processes` that were launched. ClusterError
        where it is none.

        ``local`` is measured on this machine, once, when `cache` names a folder that keeps the result; without one it is the
        conservative description beside this file, so that nothing depends on the hour. `progress` gets a line before it is
        measured, and one after.
        """
        if text.endswith((".yaml", ".yml")):
            return read_cluster(Path(text), text)
        if "+" in text:
            parts = text.split("+")
            if len(parts) > _MOST_PARTS:
                raise ClusterError(f"a cluster of {len(parts)} parts: join at most {_MOST_PARTS}")
            return heterogeneous_cluster(tuple(Cluster.parse(part.strip()) for part in parts), text)
        preset, _, count = text.partition(":")
        if preset not in presets():
            raise ClusterError(
                f"no cluster {preset[:80]!r}: write one of {', '.join(presets())} with :nodes, or the path of a .yaml file"
            )
        whole = count.isascii() and count.isdigit() and len(count) <= _DIGITS
        if count and (not whole or int(count) < 1):
            raise ClusterError(f"cluster {text[:80]!r}: {count[:40]!r} is not a number of nodes; write {preset}:1")
        if preset == "local":
            return _local(int(count or processes or "1"), cache, progress)
        if processes and not count:
            return _of_processes(preset, processes)
        return with_nodes(read_cluster(preset_path(preset), preset), text, int(count or "1"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the inverse of `from_dict`."""
        data = asdict(self)
        for each in (data, *data["groups"]):
            for name in ("peak", "measured_peak"):
                each["device"][name] = dict(each["device"][name])
            for link in each["links"]:
                link["factors"] = {kind: list(pair) for kind, *pair in link["factors"]}
                link["measured"] = [_measured_entry(measured) for measured in link["measured"]]
        plain: dict[str, Any] = _lists(data)
        return plain

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """Read a cluster from plain data. ClusterError tells the path of what is missing or wrong, and how to mend it."""
        readers: dict[str, Any] = {
            "device": parser.parse_device,
            "links": parser.list_of(parser.parse_link),
            "host": parser.optional_of(parser.parse_offload_target),
            "nvme": parser.optional_of(parser.parse_offload_target),
            "algorithms": parser.list_of(parser.parse_algorithm),
            "groups": parser.list_of(parser.parse_node_group),
            "overlap": parser.parse_overlap,
            "state_layout": parser.parse_state_layout,
            "expert_load": parse_expert_load,
            "document_lengths": parse_document_lengths,
        }
        cluster: Cluster = parser.parse_dataclass(Cluster, data, "", readers)
        parser.check_cluster(cluster.device, cluster.links, cluster.size, cluster.algorithms)
        return cluster


_DIGITS = 6
_MOST_PARTS = 16
"""Limits of a cluster's name: digits of its number of nodes, and parts that are joined."""


def _local(processes: int, cache: Path | None, progress: Callable[[str], object] | None) -> Cluster:
    local: Any = import_module("autopar.cost_models.calibrate.local_cluster")  # it imports this module
    if cache is None:
        return local.default_local_cluster(processes)  # type: ignore[no-any-return]
    return local.measured_local_cluster(processes, cache, progress or (lambda line: None))  # type: ignore[no-any-return]


def _of_processes(preset: str, processes: int) -> Cluster:
    """Return whole nodes, or a part of one."""
    one = read_cluster(preset_path(preset), preset)
    if processes > one.size and processes % one.size:
        raise ClusterError(
            f"{processes} processes were launched, and a node of {preset} has {one.size} devices: launch a multiple of "
            f"{one.size}, or describe the cluster in a .yaml file"
        )
    nodes = processes // one.size
    return with_nodes(one, f"{preset}:{nodes}", nodes) if nodes else with_devices(one, f"{preset}:1/{processes}", processes)


def read_cluster(path: Path, name: str) -> Cluster:
    """Read a cluster from a YAML file; units may be in the keys (``memory_gib``). Instead of a device it may have `groups`, each
    with a `cluster` as `Cluster.parse` takes it; the other keys of the file (links, host, nvme) then replace those of the
    bottleneck. With ``like: dgx-h100`` it tells only what differs from that preset. A device of a known `generation` needs no
    fractions: they are those of our own programs (`planner_fractions`). ``tuned`` has the shares that steps reached. ClusterError
    names file and fault."""
    data = read_yaml(path)
    try:
        tuned = parse_tuned(data.pop("tuned", None))
        return with_tuned_rates(_cluster_of(with_base(data), name), tuned)
    except ClusterError as error:
        raise ClusterError(f"{path.name}: {error}") from None
    except ValueError as error:
        raise ClusterError(f"{path.name}: {error}") from None
    except (KeyError, TypeError) as error:
        raise ClusterError(f"{path.name}: each of groups needs a cluster ({error})") from None


def _cluster_of(data: dict[str, Any], name: str) -> Cluster:
    if "groups" in data and "device" not in data:
        names = [str(group["cluster"]) for group in data.pop("groups")]
        if len(names) > _MOST_PARTS or not names or any(name.endswith((".yaml", ".yml")) for name in names):
            raise ClusterError(f"groups: write 1 to {_MOST_PARTS} clusters by their names, each of preset:nodes")
        clusters = tuple(map(Cluster.parse, names))
        return Cluster.from_dict({**heterogeneous_cluster(clusters, name).to_dict(), **data})
    if isinstance(device := data.get("device"), dict):
        data["device"] = planner_fractions(str(device.get("generation", ""))) | device
    alone: dict[str, Any] = {"links": []} if data.get("size", 1) == 1 else {}
    return Cluster.from_dict({"name": name, "size": 1, **alone, **data})


def with_tuned_rates(cluster: Cluster, rates: TunedRates) -> Cluster:
    """Return the cluster at these shares of its figures."""
    groups = tuple(
        replace(each, device=rates.of_device(each.device), links=rates.of_links(each.links)) for each in cluster.groups
    )
    return replace(cluster, device=rates.of_device(cluster.device), links=rates.of_links(cluster.links), groups=groups)


def preset_with_devices(preset: str, size: int) -> Cluster:
    """Return `size` devices of a bundled cluster, as many as published runs have. Its file is what is scaled: in one node
    (`Cluster.parse(preset)`) a level that joins several nodes is already as narrow as the node, and would stay so."""
    return with_devices(read_cluster(preset_path(preset), preset), f"{preset}, {size} devices", size)


def with_nodes(one: Cluster, name: str, nodes: int) -> Cluster:
    """Return `nodes` copies of a one-node description: the last link joins them all."""
    return with_devices(one, name, one.size * nodes)


def with_devices(one: Cluster, name: str, size: int) -> Cluster:
    """Return `size` devices of this kind: the last link joins them all. A level that joins several nodes (a rack of trays) is
    filled evenly: it joins the most devices that divide `size`."""
    inner = [_evenly_filled(link, size) if link.devices > one.size else link for link in one.links[:-1]]
    last = replace(one.links[-1], devices=max(size, inner[-1].devices if inner else one.links[-1].devices))
    return replace(one, name=name, size=size, links=(*inner, last))


def _evenly_filled(link: Link, size: int) -> Link:
    return replace(link, devices=next(count for count in range(min(link.devices, size), 0, -1) if size % count == 0))


def heterogeneous_cluster(clusters: tuple[Cluster, ...], name: str) -> Cluster:
    """Join clusters side by side, joined by their last level; the bottleneck of each figure counts, see `Cluster`. ClusterError
    where their nodes have different numbers of devices."""
    if len({tuple(link.devices for link in each.links[:-1]) for each in clusters}) > 1:
        raise ClusterError(f"cluster {name}: the parts must have equally many devices in a node; describe it in a .yaml file")
    size = sum(each.size for each in clusters)
    links = tuple(bottleneck_of(same, {"devices", "dimensions"}) for same in zip(*(each.links for each in clusters), strict=True))
    offload_targets: dict[str, Any] = {}
    for key in ("host", "nvme"):
        targets = [target for each in clusters if (target := getattr(each, key)) is not None]
        offload_targets[key] = bottleneck_of(targets) if len(targets) == len(clusters) else None
    whole = Cluster(
        name,
        bottleneck_device([each.device for each in clusters]),
        (*links[:-1], replace(links[-1], devices=size)),
        size,
        **offload_targets,
        algorithms=tuple(name for name in clusters[0].algorithms if all(name in each.algorithms for each in clusters)),
        groups=tuple(NodeGroup(each.device, each.links, each.size) for each in clusters),
        overlap=replace(clusters[0].overlap, contention=max(each.overlap.contention for each in clusters)),
        note=bottleneck_note([(each.size, each.device) for each in clusters]),
    )
    parser.check_cluster(whole.device, whole.links, whole.size, whole.algorithms)
    return whole


def with_memory_margin(cluster: Cluster, margin: float | None = None, held_bytes: int = 0) -> Cluster:
    """Return the cluster on whose devices plans leave a share `margin` of the memory free; None: that of the cluster's file, else
    `allocator.MEMORY_MARGIN`; and `held_bytes` to other models. ClusterError where it is no share."""
    if margin is None:
        margin = cluster.device.memory_margin or MEMORY_MARGIN
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ClusterError(f"memory_margin {margin} is no share of memory: write 0 (none) or more, below 1, such as 0.1")

    def changed(device: Device) -> Device:
        return replace(device, memory_margin=float(margin), held_bytes=held_bytes or device.held_bytes)

    groups = tuple(NodeGroup(changed(group.device), group.links, group.size) for group in cluster.groups)
    return replace(cluster, device=changed(cluster.device), groups=groups)
