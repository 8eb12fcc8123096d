"""From measurements to a cluster: the device's rates, and the link whose latency and bandwidth explain the collectives best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from operator import mul
from typing import Any

from autopar.cost_models.cluster_file import in_human_units, preset_path, presets
from autopar.cost_models.collectives import collective_seconds, line_of
from autopar.cost_models.devices import AxisLink, Device, Level, Link, Store
from autopar.cost_models.hardware import Cluster, read
from autopar.cost_models.kernels import SPECIAL_BACKWARD
from autopar.cost_models.measure import Measured, Seen
from autopar.cost_models.overlap import Overlap

BUSY = 1.5
SPREAD = 0.3
"""What was measured while everything took over `BUSY` times as long, or with a larger spread than this, is not sure."""


MOST_CONTENTION = 0.95


@dataclass(frozen=True, slots=True)
class Calibration:
    """The cluster, the measurements behind it, and how far the link's two numbers are from each collective (seconds predicted
    over measured)."""

    cluster: Cluster
    seen: Seen
    ratios: tuple[float, ...]


def calibration(name: str, processes: int, seen: Seen, day: str = "") -> Calibration:
    """The cluster of `processes` devices that `seen`, of that day, describes."""
    device = device_of(seen)
    on_gpu = device.kind == "cuda"
    link = Link("nvlink" if on_gpu else "loopback", processes, 1e9, 1e-6)
    algorithms = ("ring", "tree", "switch") if on_gpu else ("ring",)
    if processes > 1:
        link = fitted(link, processes, device.launch_seconds, seen.collectives, on_gpu)
    cluster = Cluster(
        name,
        device,
        (link,) if processes > 1 else (),
        processes,
        host=_host(seen),
        algorithms=algorithms,
        overlap=Overlap(contention=round(min(MOST_CONTENTION, seen.contention), 3)),
        note=noted(seen, day),
    )
    ratios = tuple(_predicted(link, processes, device.launch_seconds, each) / each.seconds for each in seen.collectives)
    return Calibration(cluster, seen, ratios)


def noted(seen: Seen, day: str) -> str:
    """What a plan says of a measured cluster."""
    said = f"measured {day}; repetitions differ by {100 * seen.spread:.0f} %"
    doubt = "the machine was busy, so that an idle one may be faster" if seen.busy > BUSY else ""
    doubt = doubt or ("too much to be sure of more than the order of magnitude" if seen.spread > SPREAD else "")
    return f"{said}; {doubt}: measure again with `autopar calibrate`" if doubt else said


def is_sure(seen: Seen) -> bool:
    """Whether it was measured on a quiet machine."""
    return seen.busy <= BUSY and seen.spread <= SPREAD


def device_of(seen: Seen) -> Device:
    """Peak of a dtype: that of the data sheet where the device is a bundled one, else the fastest product. Fractions: geometric
    means over shapes against the peak of the main dtype (bfloat16 on a GPU, float32 on a CPU)."""
    facts, main = seen.facts, "bfloat16" if seen.facts["kind"] == "cuda" else "float32"
    fastest: dict[str, float] = {}
    for each in _of("gemm", seen):
        dtype = each.name.split(".")[1]
        fastest[dtype] = max(fastest.get(dtype, 0.0), each.rate)
    sheet = known_device(facts["name"])
    peak = {**dict(sheet.peak), **{k: v for k, v in fastest.items() if k not in dict(sheet.peak)}} if sheet else fastest
    (stream,), (launch,), special = _of("stream", seen), _of("launch.chain", seen, ""), _of("special", seen)
    update = _of("launch.update", seen, "")
    bandwidth = sheet.bandwidth_bytes_per_second if sheet else stream.rate
    return Device(
        name=str(facts["name"]),
        kind=str(facts["kind"]),
        peak=tuple(peak.items()),
        memory_bytes=int(facts["memory_bytes"]),
        bandwidth_bytes_per_second=bandwidth,
        launch_seconds=launch.seconds / launch.work,
        matmul_fraction=_share(_of(f"gemm.{main}", seen), peak[main]),
        attention_fraction=_share(_of("attention", seen), peak[main]),
        bandwidth_fraction=_share([stream], bandwidth),
        base_bytes=int(facts["base_bytes"]),
        generation=str(facts.get("generation") or facts["kind"]),
        multiprocessors=int(facts.get("multiprocessors", 0)),
        l2_bytes=int(facts.get("l2_bytes", 0)),
        measured_peak=tuple(fastest.items()),
        special_seconds=_special_seconds(special, stream.rate) if facts["kind"] == "cpu" else 0.0,
        update_seconds=update[0].seconds / update[0].work if update else 0.0,
        allocator_slack=sheet.allocator_slack if sheet else 0.05 if facts["kind"] == "cuda" else 0.0,
    )


def known_device(name: str) -> Device | None:
    """The bundled device that a driver's name (``NVIDIA H200``, ``NVIDIA A100-SXM4-80GB``) stands for, if any."""
    wanted = name.upper().replace("-", " ").split()
    for preset in presets():
        device = read(preset_path(preset), preset).device
        words = device.name.upper().split()
        size = words[-1].removesuffix("GB")
        if words[0] in wanted and "PCIE" not in wanted and (words[0] not in ("A100", "V100") or f"{size}GB" in wanted):
            return device
    return None


def _of(kind: str, seen: Seen, dot: str = ".") -> list[Measured]:
    return [each for each in seen.operations if each.name.startswith(f"{kind}{dot}")]


def _special_seconds(measured: Sequence[Measured], bytes_per_second: float) -> float:
    """Per element of a forward, which with its backward takes three times as long, besides five accesses of four bytes."""
    return max(0.0, *((each.seconds / each.work - 20.0 / bytes_per_second) / (1 + SPECIAL_BACKWARD) for each in measured), 0.0)


def _share(measured: Sequence[Measured], peak: float) -> float:
    """The geometric mean of the rates over the peak, to four digits; at most 1."""
    mean = exp(sum(log(each.rate) for each in measured) / len(measured))
    return float(f"{min(1.0, mean / peak):.4g}")


def _host(seen: Seen) -> Store | None:
    read_rate, write_rate = ([each.rate for each in seen.operations if each.name == f"host.{way}"] for way in ("read", "write"))
    if not read_rate:
        return None
    return Store("host", float(seen.facts["host_bytes"]), read_rate[0], write_rate[0], 1e-5)


def _predicted(link: Link, size: int, launch_seconds: float, each: Measured) -> float:
    level = Level(
        link.name,
        size,
        link.bandwidth_bytes_per_second,
        link.latency_seconds,
        low_latency_seconds=link.low_latency_seconds,
        low_latency_bandwidth_bytes_per_second=link.low_latency_bandwidth_bytes_per_second,
        factors=link.factors,
    )
    return collective_seconds(each.name, each.work, AxisLink(size, (level,), launch_seconds, ("ring",)))


def fitted(link: Link, size: int, launch_seconds: float, seen: Sequence[Measured], small_protocol: bool) -> Link:
    """Latency and bandwidth from the all-reduces. Each other kind may differ from its formula by two constant factors, of latency
    and of transfer."""
    reduced = [each for each in seen if each.name == "all_reduce"]
    unit = replace(link, latency_seconds=1.0, bandwidth_bytes_per_second=1.0)
    latency, transfer = _line(unit, size, launch_seconds, reduced)
    found = replace(link, latency_seconds=latency, bandwidth_bytes_per_second=1.0 / transfer)
    if small_protocol:
        found = _two_protocols(found, size, launch_seconds, reduced)
    factors = []
    for kind in dict.fromkeys(each.name for each in seen if each.name != "all_reduce"):
        pair = _line(found, size, launch_seconds, [each for each in seen if each.name == kind])
        factors.append((kind, float(f"{pair[0]:.3g}"), float(f"{pair[1]:.3g}")))
    return replace(found, factors=tuple(factors))


def _line(link: Link, size: int, launch_seconds: float, seen: Sequence[Measured]) -> tuple[float, float]:
    """(x, y) so that ``launch + x latency + y transfer`` is nearest to the measurements, in squares of relative errors; both are
    at least a thousandth of their share, since a measurement may say anything."""
    level = Level(link.name, size, link.bandwidth_bytes_per_second, link.latency_seconds)
    kind = seen[0].name
    way = line_of(kind, "direct" if kind == "all_to_all" else "ring", "", AxisLink(size, (level,), 0.0, ("ring",)))
    a = [way.latency_seconds / each.seconds for each in seen]
    b = [way.seconds_per_byte * each.work / each.seconds for each in seen]
    t = [max(0.01, 1.0 - launch_seconds / each.seconds) for each in seen]
    aa, ab, bb, at, bt = (sum(map(mul, x, y)) for x, y in ((a, a), (a, b), (b, b), (a, t), (b, t)))
    determinant = aa * bb - ab * ab
    x, y = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    return (max(x, 1e-3 * at / aa), bt / bb) if x <= 0 else (at / aa, 1e-3 * bt / bb) if y <= 0 else (x, y)


def _two_protocols(link: Link, size: int, launch_seconds: float, seen: Sequence[Measured]) -> Link:
    """The four numbers of two protocols with the least sum of ``|log(predicted / measured)|``, by descent along one at a time."""
    numbers = {
        "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second,
        "latency_seconds": 2 * link.latency_seconds,
        "low_latency_bandwidth_bytes_per_second": link.bandwidth_bytes_per_second / 2,
        "low_latency_seconds": link.latency_seconds,
    }

    def error(trial: dict[str, float]) -> float:
        made = replace(link, **trial)  # type: ignore[arg-type]
        return sum(abs(log(_predicted(made, size, launch_seconds, each) / each.seconds)) for each in seen)

    best = error(numbers)
    for step in (2.0, 1.3, 1.1, 1.03, 1.01):
        moved = True
        while moved:
            moved = False
            for name in numbers:
                for factor in (step, 1 / step):
                    trial = {**numbers, name: numbers[name] * factor}
                    if (found := error(trial)) < best * (1 - 1e-9):
                        numbers, best, moved = trial, found, True
    return replace(link, **numbers)  # type: ignore[arg-type]


def document(found: Calibration, source: dict[str, Any]) -> dict[str, Any]:
    """What goes into the YAML file: the cluster in human units, and the measurements under ``source`` (not read again)."""
    rows = {each.name: f"{each.rate / 1e9:.4g} G/s, {each.seconds * 1e6:.4g} us" for each in found.seen.operations}
    sent = {
        f"{each.name} {each.work:.0f} B": f"{each.seconds * 1e6:.4g} us, predicted {ratio * each.seconds * 1e6:.4g}"
        for each, ratio in zip(found.seen.collectives, found.ratios, strict=True)
    }
    how = {**source, "busy": round(found.seen.busy, 2), "spread": round(found.seen.spread, 3)}
    return {**in_human_units(found.cluster.to_dict()), "source": {**how, **rows, **sent}}
