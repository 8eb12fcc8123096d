"""The parser of a `Cluster` from plain data. Every ClusterError is one line: the path of the key, its value, and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from itertools import pairwise
from math import prod
from typing import Any

from autopar.cost_models.hardware.allocator import COMMUNICATOR_BYTES
from autopar.cost_models.hardware.cluster_file import human_key, nonnegative
from autopar.cost_models.hardware.device_specs import ALGORITHMS, LINK_KINDS, Device, Link, NodeGroup, OffloadTarget
from autopar.cost_models.hardware.measured_collectives import KINDS, STATE_KINDS, MeasuredCollective, PiecewiseLinear
from autopar.cost_models.hardware.software_traits import Overlap, StateLayout
from autopar.errors import ClusterError

Reader = Callable[[Any, str], Any]

MOST_FRACTION = 1.5
"""Of a data sheet's peak, the largest share that a file may say is reached."""


def parse_dataclass(cls: type[Any], data: Any, path: str, readers: Mapping[str, Reader]) -> Any:
    """Read an instance of dataclass `cls`; keys are read by their reader, or by their annotation. `path` leads to `data`."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{path or 'the file'} is {_shown(data)}: write keys with values, such as {_example(cls)}")
    fields_by_name = {field.name: field for field in fields(cls)}
    if unknown := [key for key in data if key not in fields_by_name]:
        can = ", ".join(human_key(name) for name in fields_by_name)
        raise ClusterError(f"{_join(path, str(unknown[0])[:80])} is unknown: take it out, or write one of {can}")
    missing = [name for name, field in fields_by_name.items() if name not in data and _is_required(field)]
    if missing:
        raise ClusterError(f"{_join(path, missing[0])} is missing: add {human_key(missing[0])}, as in {_example(cls)}")
    values = {}
    for name, value in data.items():
        where = _join(path, name)
        read = readers.get(name) or _READERS.get(str(fields_by_name[name].type))
        values[name] = read(value, where) if read else value
    return cls(**values)


def _shown(value: object) -> str:
    """A value of a file in a message, which stays one that can be read."""
    return text if len(text := repr(value)) <= 80 else f"{text[:80]} ..."


def _join(path: str, key: object) -> str:
    return f"{path}.{human_key(str(key))}" if path else human_key(str(key))


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _example(cls: type[Any]) -> str:
    """The required keys."""
    examples = {"name": "X", "kind": "cuda", "peak": "{float32: 60, bfloat16: 900}"}
    each = [f"{human_key(f.name)}: {examples.get(f.name, 1)}" for f in fields(cls) if _is_required(f)]
    return "{" + ", ".join(each) + "}"


def _number(value: Any, where: str) -> float:
    try:
        return nonnegative(value, where)
    except ValueError as error:
        raise ClusterError(str(error)) from None


def _whole(value: Any, where: str) -> int:
    return int(_number(value, where))


def _text(value: Any, where: str) -> str:
    if isinstance(value, Mapping | list):
        raise ClusterError(f"{where} is {_shown(value)}: write a name")
    return str(value)


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ClusterError(f"{where} is {_shown(value)}: write true or false")
    return value


_READERS: Mapping[str, Reader] = {"float": _number, "int": _whole, "str": _text, "bool": _truth}


def list_of(read: Reader) -> Reader:
    """Return a reader of a tuple of what `read` reads."""

    def every(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ClusterError(f"{where} is {_shown(value)}: write a list, each entry after a dash")
        return tuple(read(each, f"{where}[{index}]") for index, each in enumerate(value))

    return every


def optional_of(read: Reader) -> Reader:
    """Return a reader of None, or what `read` reads."""
    return lambda value, where: None if value is None else read(value, where)


def _rates(value: Any, where: str) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, Mapping):
        raise ClusterError(f"{where} is {_shown(value)}: write the rate of each dtype, such as {{float32: 60, bfloat16: 900}}")
    return tuple((str(name), _number(rate, f"{where}.{name}")) for name, rate in value.items())


def _factors(value: Any, where: str) -> tuple[tuple[str, float, float], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value.values()):
        raise ClusterError(
            f"{where} is {_shown(value)}: write each kind of collective with its factors of latency and transfer, [1, 1]"
        )
    at = f"{where}.%s"
    return tuple((str(kind), _number(pair[0], at % kind), _number(pair[1], at % kind)) for kind, pair in value.items())


_TABLE = "{kind: all_gather, width: 4, by_bytes_us: {65536: 900, 16777216: 23000}}"


def parse_measured(value: Any, where: str) -> MeasuredCollective:
    """Read the measured seconds of one kind of collective."""
    if not isinstance(value, Mapping) or set(value) != {"kind", "width", "by_bytes_seconds"}:
        raise ClusterError(f"{where} is {str(value)[:60]}: write kind, width and by_bytes_us, as in {_TABLE}")
    kind, width, kinds = value["kind"], value["width"], (*KINDS, *STATE_KINDS)
    if kind not in kinds:
        raise ClusterError(f"{where}.kind is {_shown(kind)}: write one of {', '.join(kinds)}")
    if isinstance(width, bool) or not isinstance(width, int) or width < 2:
        raise ClusterError(f"{where}.width is {_shown(width)}: write among how many neighbours it was measured, at least 2")
    return MeasuredCollective(kind, width, _table(value["by_bytes_seconds"], f"{where}.by_bytes_us"))


def _table(value: Any, where: str) -> PiecewiseLinear:
    if not isinstance(value, Mapping) or len(value) < 2:
        raise ClusterError(f"{where} is {str(value)[:60]}: write the microseconds of at least two sizes in bytes, as in {_TABLE}")
    try:
        points = sorted((nonnegative(float(size), where), nonnegative(seconds, where)) for size, seconds in value.items())
    except (TypeError, ValueError):
        raise ClusterError(f"{where} is {str(value)[:60]}: write bytes and microseconds as numbers, as in {_TABLE}") from None
    for (left, low), (right, high) in pairwise(points):
        if left == right:
            raise ClusterError(f"{where} has {left:.0f} bytes twice: take one out")
        if high < low:
            raise ClusterError(f"{where} falls from {left:.0f} to {right:.0f} bytes: write microseconds that do not fall")
    if points[0][1] <= 0:
        raise ClusterError(f"{where} has no time for {points[0][0]:.0f} bytes: write microseconds above 0")
    return PiecewiseLinear.of(points)


def _link_kind(value: Any, where: str) -> str:
    if value not in LINK_KINDS:
        raise ClusterError(f"{where} is {_shown(value)}: write one of {', '.join(LINK_KINDS)}")
    return str(value)


def parse_algorithm(value: Any, where: str) -> str:
    """Read an algorithm of the collective library."""
    if value not in ALGORITHMS:
        raise ClusterError(f"{where} is {_shown(value)}: write some of {', '.join(ALGORITHMS)}")
    return str(value)


def parse_device(data: Any, where: str) -> Device:
    """Read a device."""
    device: Device = parse_dataclass(Device, data, where, {"peak": _rates, "measured_peak": _rates})
    if device.kind != "cpu" and "communicator_bytes" not in data:
        device = replace(device, communicator_bytes=COMMUNICATOR_BYTES)
    return device


def reader_of(cls: type[Any], **readers: Reader) -> Reader:
    """Return a reader of instances of dataclass `cls`, as `parse_dataclass` reads them."""
    return lambda data, where: parse_dataclass(cls, data, where, readers)


parse_link = reader_of(Link, kind=_link_kind, dimensions=list_of(_whole), factors=_factors, measured=list_of(parse_measured))
parse_offload_target = reader_of(OffloadTarget)
parse_node_group = reader_of(NodeGroup, device=parse_device, links=list_of(parse_link))
"""Readers of a link level, of host memory or NVMe, and of the nodes of one kind in a heterogeneous cluster."""


def parse_overlap(data: Any, where: str) -> Overlap:
    """Read which communication overlaps with compute."""
    overlap: Overlap = parse_dataclass(Overlap, data, where, {})
    if not 0 <= overlap.contention < 1:
        raise ClusterError(f"{where}.contention is {overlap.contention}: write a share below 1")
    return overlap


def parse_state_layout(data: Any, where: str) -> StateLayout:
    """Read an optimizer state layout."""
    layout: StateLayout = parse_dataclass(StateLayout, data, where, {})
    if {layout.gradient_bytes, layout.bfloat16_gradient_bytes} - {0, 2, 4} or layout.accesses < 0:
        raise ClusterError(f"{where}: write gradient_bytes 0, 2 or 4, and accesses of at least 0")
    return layout


_LEAST = 1e-9
"""The least rate or share: products of smaller ones may be 0."""


def check_cluster(device: Device, links: Sequence[Link], size: int, algorithms: Sequence[str]) -> None:
    """Raise ClusterError where the figures of a cluster contradict each other."""
    above = ("bandwidth_bytes_per_second", "matmul_fraction", "attention_fraction", "bandwidth_fraction", "memory_bytes")
    for name in above:
        if getattr(device, name) < _LEAST:
            raise ClusterError(f"device.{human_key(name)} is {getattr(device, name):g}: write a number above 0")
    for name in (
        "matmul_fraction",
        "attention_fraction",
        "causal_attention_fraction",
        "convolution_fraction",
        "bandwidth_fraction",
    ):
        if getattr(device, name) > MOST_FRACTION:
            raise ClusterError(f"device.{name} is {getattr(device, name):g}: write the share of the peak that is reached, as 0.7")
    if device.ranks_per_core < 1:
        raise ClusterError(f"device.ranks_per_core is {device.ranks_per_core:g}: write how many ranks share a core, at least 1")
    _check_measured_peak(device)
    if "float32" not in dict(device.peak) or min(peak for _, peak in device.peak) < _LEAST:
        raise ClusterError("device.peak_tflops needs float32, and each rate above 0: such as {float32: 60, bfloat16: 900}")
    if device.memory_margin >= 1:
        raise ClusterError(f"device.memory_margin is {device.memory_margin:g}: write the share of memory to leave free, as 0.1")
    if size < 1:
        raise ClusterError(f"size is {size}: write how many devices there are, at least 1")
    if not algorithms:
        raise ClusterError(f"algorithms is empty: write some of {', '.join(ALGORITHMS)}")
    if size > 1 and not links:
        raise ClusterError(f"links is empty, but size is {size}: add the level that joins the devices, or write size: 1")
    _check_links(links, size)


def _check_measured_peak(device: Device) -> None:
    """Check that no matrix product is faster than the fastest that was measured, in any dtype."""
    shares = {dtype: rate / device.peak_flops_per_second(dtype) for dtype, rate in device.measured_peak}
    if shares and device.matmul_fraction > max(shares.values()) * (1 + _ROUNDED):
        dtype = max(shares, key=lambda name: shares[name])
        raise ClusterError(
            f"device.matmul_fraction is {device.matmul_fraction:g}, but the fastest product measured on it "
            f"reaches {shares[dtype]:.3f} of its peak ({dtype}): write at most that, or correct measured_peak_tflops"
        )


_ROUNDED = 1e-3


def _check_measured(level: Link, where: str) -> None:
    if level.measured and level.kind != "switch":
        raise ClusterError(f"{where}.measured is of a {level.kind}: take it out, as only links of kind switch can have it")
    tables = [(each.kind, each.width) for each in level.measured]
    if twice := [kind for kind, width in tables if tables.count((kind, width)) > 1]:
        raise ClusterError(f"{where}.measured has {twice[0]} twice: take one out")


def _check_links(links: Sequence[Link], size: int) -> None:
    inside, inner = 1, "a single device"
    for index, level in enumerate(links):
        where = f"links[{index}]"
        if level.bandwidth_bytes_per_second < _LEAST:
            raise ClusterError(f"{where}.bandwidth_gb_per_second is 0: write what one device can send, above 0")
        if level.oversubscription < 1:
            raise ClusterError(f"{where}.oversubscription is {level.oversubscription:g}: write 1 (none) or more")
        if level.devices < 1 or level.devices % inside:
            raise ClusterError(f"{where}.devices is {level.devices}: write a multiple of {inside}, as {inner} joins so many")
        if level.kind == "torus" and (not level.dimensions or prod(level.dimensions) * inside != level.devices):
            raise ClusterError(f"{where}.dimensions of torus {level.name} must multiply to {level.devices // inside}")
        _check_measured(level, where)
        inside, inner = level.devices, f"{where} ({level.name})"
    if links and size > inside:
        raise ClusterError(f"size is {size}, but {inner} joins only {inside} devices: raise its devices, or lower size")
