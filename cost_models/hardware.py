"""Devices, link levels and clusters: the numbers of a data sheet, read from YAML, and how a mesh axis maps on the links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from math import gcd, prod
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import ClusterError
from autopar.ir.mesh import Mesh

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one process of a CPU machine.

    `peak` is FLOP/s per dtype as the data sheet prints it. A fraction tells which share of a peak is reached: of `peak` by
    matrix products and by attention, of the memory bandwidth by streaming kernels. `launch_seconds` is the floor below which
    no operation ends. `base_bytes` is what context, allocator and communicator take before the model.
    """

    name: str
    kind: str
    peak: tuple[tuple[str, float], ...]
    memory_bytes: int
    bandwidth_bytes_per_second: float
    launch_seconds: float
    matmul_fraction: float
    attention_fraction: float
    bandwidth_fraction: float
    base_bytes: int

    def peak_flops_per_second(self, dtype: str) -> float:
        """The data-sheet peak of dense matrix products in `dtype`; an unlisted dtype counts as float32."""
        return next((peak for name, peak in self.peak if name == dtype), dict(self.peak)["float32"])


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network. `devices` are joined by one switch of this level; bandwidth is per device and direction."""

    name: str
    devices: int
    bandwidth_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Level:
    """The part of a group that one link level joins: `width` members, in a ring step of `latency_seconds`."""

    name: str
    width: int
    bandwidth_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class AxisLink:
    """What the groups of one mesh axis run over: the levels from inside the node outwards; their widths multiply to `size`."""

    size: int
    levels: tuple[Level, ...]
    launch_seconds: float = 0.0

    @property
    def names(self) -> frozenset[str]:
        """The physical links in use."""
        return frozenset(level.name for level in self.levels)

    def shares(self, other: AxisLink) -> bool:
        """Whether both use one physical link."""
        return not self.names.isdisjoint(other.names)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices, and links from the innermost level outwards. The last level joins everything."""

    name: str
    device: Device
    links: tuple[Link, ...]
    size: int

    @staticmethod
    def parse(text: str, cache: Path | None = None) -> Cluster:
        """``preset:nodes`` (``dgx-h100:8``), ``local:processes``, or the path of a YAML file. ClusterError where it is none.

        ``local`` is measured on this machine, once, when `cache` names a folder that keeps the result; without one it is the
        conservative description beside this file, so that nothing depends on the hour.
        """
        if text.endswith((".yaml", ".yml")):
            return read(Path(text), text)
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
        data["device"]["peak"] = dict(self.device.peak)
        data["links"] = [asdict(link) for link in self.links]
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """A cluster from plain data. ClusterError names what is missing or of a wrong type."""
        try:
            device = dict(data["device"])
            device["peak"] = tuple((str(name), _number(value, "peak")) for name, value in device["peak"].items())
            for key in device.keys() - {"name", "kind", "peak"}:
                device[key] = _number(device[key], key)
            device["memory_bytes"], device["base_bytes"] = int(device["memory_bytes"]), int(device["base_bytes"])
            links = tuple(
                Link(
                    str(link["name"]),
                    int(_number(link["devices"], "devices")),
                    _number(link["bandwidth_bytes_per_second"], "bandwidth_bytes_per_second"),
                    _number(link["latency_seconds"], "latency_seconds"),
                )
                for link in data["links"]
            )
            cluster = Cluster(str(data["name"]), Device(**device), links, int(_number(data["size"], "size")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ClusterError(f"cluster description: {error}") from None
        return _checked(cluster)


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{key} is {value!r}, not a number of at least 0")
    return float(value)


def _checked(cluster: Cluster) -> Cluster:
    device = cluster.device
    rates = (device.bandwidth_bytes_per_second, device.matmul_fraction, device.attention_fraction, device.bandwidth_fraction)
    if "float32" not in dict(device.peak):
        raise ClusterError(f"cluster {cluster.name}: the device's peak lacks float32")
    if cluster.size < 1 or min(*rates, *(peak for _, peak in device.peak)) <= 0 or device.memory_bytes <= 0:
        raise ClusterError(f"cluster {cluster.name}: size, memory, peaks, bandwidth and fractions must be above 0")
    if cluster.size > 1 and not cluster.links:
        raise ClusterError(f"cluster {cluster.name}: {cluster.size} devices need at least one link level")
    for inner, outer in zip(cluster.links, cluster.links[1:], strict=False):
        if outer.devices % inner.devices or outer.devices < inner.devices:
            raise ClusterError(
                f"cluster {cluster.name}: link {outer.name} must join whole groups of {inner.devices} ({inner.name})"
            )
    if any(link.devices < 1 or link.bandwidth_bytes_per_second <= 0 for link in cluster.links):
        raise ClusterError(f"cluster {cluster.name}: a link needs at least one device and a bandwidth above 0")
    if cluster.links and cluster.size > cluster.links[-1].devices:
        raise ClusterError(
            f"cluster {cluster.name}: {cluster.size} devices, but the last link joins only {cluster.links[-1].devices}"
        )
    return cluster


def preset_path(name: str) -> Path:
    return Path(__file__).parent / f"{name}.yaml"


@lru_cache(maxsize=1)
def presets() -> tuple[str, ...]:
    """The bundled cluster names, to be followed by ``:nodes`` (``local``: by ``:processes``)."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.yaml")))


_UNITS = {"_tflops": 1e12, "_gib": GIB, "_gb_per_second": 1e9, "_us": 1e-6}
_SPELLING = {"_tflops": "", "_gib": "_bytes", "_gb_per_second": "_bytes_per_second", "_us": "_seconds"}


def _units(data: Any) -> Any:
    """Human units in keys (``memory_gib: 80``) to the ones of the code (``memory_bytes``)."""
    if isinstance(data, list):
        return [_units(item) for item in data]
    if not isinstance(data, dict):
        return data
    out: dict[str, Any] = {}
    for key, item in data.items():
        unit = next((unit for unit in _UNITS if str(key).endswith(unit)), None)
        if unit is None:
            out[str(key)] = _units(item)
        elif isinstance(item, dict):
            out[str(key).removesuffix(unit) + _SPELLING[unit]] = {k: _number(v, str(key)) * _UNITS[unit] for k, v in item.items()}
        else:
            out[str(key).removesuffix(unit) + _SPELLING[unit]] = _number(item, str(key)) * _UNITS[unit]
    return out


def read(path: Path, name: str) -> Cluster:
    """One description from a YAML file; units may be in the keys (``memory_gib``). ClusterError names file and fault."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ClusterError(f"cluster file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"cluster file {path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ClusterError(f"cluster file {path}: expected keys name, device, links and size")
    data.pop("source", None)
    try:
        return Cluster.from_dict({"name": name, "size": 1, **_units(data)})
    except ClusterError as error:
        raise ClusterError(f"{path.name}: {error}") from None
    except ValueError as error:
        raise ClusterError(f"cluster file {path}: {error}") from None


def scaled(one: Cluster, name: str, nodes: int) -> Cluster:
    """`nodes` copies of a one-node description: the last link joins them all."""
    size = one.size * nodes
    last = replace(one.links[-1], devices=max(size, one.links[-1].devices))
    return replace(one, name=name, size=size, links=(*one.links[:-1], last))


def check_mesh(cluster: Cluster, mesh: Mesh) -> None:
    """ClusterError unless the mesh uses every device."""
    if mesh.size != cluster.size:
        raise ClusterError(
            f"the mesh {mesh} has {mesh.size} ranks, but {cluster.name} has {cluster.size} devices: let the axes multiply to it"
        )


@lru_cache(maxsize=1024)
def links_of_axis(cluster: Cluster, mesh: Mesh, axis: int) -> AxisLink:
    """The link levels that the groups of `axis` use. Ranks are row-major: neighbours on the last axis are neighbours in a node.

    A group steps through ranks in strides of ``prod(sizes after axis)``; a level that joins D devices holds
    ``gcd(size, D / stride)`` of its members, the rest is joined further out. Where a stride does not divide D the members are
    taken to lie apart (a group that straddles nodes runs at the speed of its slowest link).
    """
    check_mesh(cluster, mesh)
    stride, size = prod(mesh.sizes[axis + 1 :]), mesh.sizes[axis]
    levels: list[Level] = []
    inside = 1
    for index, link in enumerate(cluster.links):
        last = index == len(cluster.links) - 1
        reach = size if last else gcd(size, link.devices // stride) if link.devices % stride == 0 else 1
        width = reach // inside
        if width > 1:
            levels.append(Level(link.name, width, link.bandwidth_bytes_per_second, link.latency_seconds))
            inside = reach
    return AxisLink(size, tuple(levels), cluster.device.launch_seconds)
