"""The fit of a cluster to measurements: the rates of the device, and the link that explains the collectives best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from operator import mul
from types import MappingProxyType
from typing import Any

from autopar.cost_models.calibrate.measure import (
    PACKED,
    PACKED_MATRICES,
    PACKED_ROWS,
    CalibrationRun,
    Timing,
)
from autopar.cost_models.comm.alpha_beta import algorithm_cost
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.compute.kernels import TRANSCENDENTAL_BACKWARD
from autopar.cost_models.hardware.allocator import COMMUNICATOR_BYTES
from autopar.cost_models.hardware.cluster import Cluster, read_cluster
from autopar.cost_models.hardware.cluster_file import in_human_units, preset_path, presets
from autopar.cost_models.hardware.device_specs import AxisLink, Device, Level, Link, OffloadTarget
from autopar.cost_models.hardware.measured_collectives import MeasuredCollective, rising
from autopar.cost_models.hardware.software_traits import Overlap

MAX_SLOWDOWN = 1.5
MAX_SPREAD = 0.3
"""A run with a larger slowdown by other programs, or a larger spread between rounds, is not reliable."""

MAX_CONTENTION = 0.95
_SHARED_CORES = 0.5


@dataclass(frozen=True, slots=True)
class Calibration:
    """The cluster, the measurements that it was fitted to, and predicted over measured seconds of each collective: by latency,
    bandwidth and factors alone where its own level has it as measured, else as plans are priced."""

    cluster: Cluster
    run: CalibrationRun
    ratios: tuple[float, ...]


def fit_cluster(name: str, processes: int, run: CalibrationRun, day: str = "") -> Calibration:
    """Fit the cluster of `processes` devices that `run`, of that day, measured."""
    device = fit_device(run)
    on_gpu = device.kind == "cuda"
    link = Link("nvlink" if on_gpu else "loopback", processes, 1e9, 1e-6)
    algorithms = ("ring", "tree", "switch") if on_gpu else ("ring",)
    if processes > 1:
        link = fit_link(link, processes, device.launch_seconds, run.collectives, on_gpu)
        link = replace(link, measured=link.measured + measured_tables(processes, run.narrower))
    cluster = Cluster(
        name,
        device,
        (link,) if processes > 1 else (),
        processes,
        host=_host_memory(run),
        algorithms=algorithms,
        overlap=measured_overlap(run),
        note=calibration_note(run, day),
    )
    ratios = tuple(predicted_seconds(link, processes, device.launch_seconds, each) / each.seconds for each in run.collectives)
    return Calibration(cluster, run, ratios)


def measured_overlap(run: CalibrationRun) -> Overlap:
    """Return what overlaps. On CPUs FSDP2's collectives return when they have ended, so that they overlap with nothing.
    Reductions of replicated gradients do, but not where ranks share cores of which a collective takes more than half. A rank
    whose message waits for its receiver's turn on a core goes on later, and leaves its own core to others."""
    contention = round(min(MAX_CONTENTION, run.contention), 3)
    on_cpu = run.facts["kind"] == "cpu"
    reduction = not on_cpu or contention < _SHARED_CORES
    shared = float(run.facts.get("ranks_per_core", 1.0)) > 1
    return Overlap(contention, gradient_reduction=reduction, parameter_gather=not on_cpu, blocking_sends=shared)


def calibration_note(run: CalibrationRun, day: str) -> str:
    """Write the note of a plan on a measured cluster."""
    note = f"measured {day}; repetitions differ by {100 * run.spread:.0f} %"
    doubt = "the machine was busy, so that an idle one may be faster" if run.slowdown > MAX_SLOWDOWN else ""
    doubt = doubt or ("too much to be sure of more than the order of magnitude" if run.spread > MAX_SPREAD else "")
    return f"{note}; {doubt}: measure again with `autopar calibrate`" if doubt else note


def is_reliable(run: CalibrationRun) -> bool:
    """Return whether the machine was idle enough."""
    return run.slowdown <= MAX_SLOWDOWN and run.spread <= MAX_SPREAD


def fit_device(run: CalibrationRun) -> Device:
    """Fit the device. Peak of a dtype: that of the data sheet where the device is a bundled one, else the fastest product or
    convolution. Fractions: geometric means over shapes against the peak of the main dtype (bfloat16 on a GPU, float32 on a
    CPU)."""
    facts, main = run.facts, "bfloat16" if run.facts["kind"] == "cuda" else "float32"
    fastest: dict[str, float] = {}
    for each in _timings("gemm", run) + _timings("convolution", run):
        dtype = each.name.split(".")[1]
        fastest[dtype] = max(fastest.get(dtype, 0.0), each.rate)
    sheet = known_device(facts["name"])
    peak = {**dict(sheet.peak), **{k: v for k, v in fastest.items() if k not in dict(sheet.peak)}} if sheet else fastest
    (stream,), (launch,), special = _timings("stream", run), _timings("launch.chain", run, ""), _timings("special", run)
    packing = packing_rate(run)
    convolutions, causal = _timings(f"convolution.{main}", run), _timings("causal_attention", run)
    update, large_update = _timings("launch.update", run, ""), _timings("update", run)
    bandwidth = sheet.bandwidth_bytes_per_second if sheet else stream.rate
    return Device(
        name=str(facts["name"]),
        kind=str(facts["kind"]),
        peak=tuple(peak.items()),
        memory_bytes=int(facts["memory_bytes"]),
        bandwidth_bytes_per_second=bandwidth,
        launch_seconds=launch.seconds / launch.work,
        matmul_fraction=_reached_fraction([_unpacked(each, packing) for each in _timings(f"gemm.{main}", run)], peak[main]),
        attention_fraction=_reached_fraction(_timings("attention", run), peak[main]),
        product_bytes_per_second=packing,
        causal_attention_fraction=_reached_fraction(causal, peak[main]) if causal else 0.0,
        convolution_fraction=_reached_fraction(convolutions, peak[main]) if convolutions else 0.0,
        bandwidth_fraction=_reached_fraction([stream], bandwidth),
        base_bytes=int(facts["base_bytes"]),
        generation=str(facts.get("generation") or facts["kind"]),
        multiprocessors=int(facts.get("multiprocessors", 0)),
        vector_bits=int(facts.get("vector_bits", 0)),
        ranks_per_core=float(facts.get("ranks_per_core", 1.0)),
        transcendental_seconds=_transcendental_seconds(special, stream.rate) if facts["kind"] == "cpu" else 0.0,
        update_seconds=update[0].seconds / update[0].work if update else 0.0,
        update_bytes_per_second=large_update[0].rate if large_update else 0.0,
        communicator_bytes=0 if facts["kind"] == "cpu" else COMMUNICATOR_BYTES,
        fresh_page_bytes_per_second=_fresh_page_rate(run),
    )


def packing_rate(run: CalibrationRun) -> float:
    """Return bytes per second: what products of few rows take beyond arithmetic is traffic (0 where none were timed)."""
    products = [each.rate for each in _timings("gemm.float32", run)]
    for each in _timings("packed_gemm", run, ""):
        arithmetic = PACKED_MATRICES * 2.0 * PACKED_ROWS * PACKED**2 / max(products)
        return each.work / max(each.seconds - arithmetic, 0.1 * each.seconds)
    return 0.0


def _unpacked(each: Timing, bytes_per_second: float) -> Timing:
    """Return a product ``gemm.dtype.MxKxN`` of float32 without the seconds of its traffic, at most half of it."""
    if not bytes_per_second:
        return each
    m, k, n = map(int, each.name.split(".")[2].split("x"))
    traffic = 4.0 * (m * k + k * n + m * n) / bytes_per_second
    return replace(each, seconds=max(each.seconds - traffic, 0.5 * each.seconds))


def _fresh_page_rate(run: CalibrationRun) -> float:
    """Return bytes per second of what a write to new memory takes longer than one to memory that is there; 0 where it was not
    timed, or takes no longer."""
    new, old = _timings("pages.new", run, ""), _timings("pages.old", run, "")
    longer = new[0].seconds - old[0].seconds if new and old else 0.0
    return float(f"{new[0].work / longer:.4g}") if longer > 0 else 0.0


def known_device(name: str) -> Device | None:
    """Return the bundled device that a driver's name stands for, if any."""
    preset = preset_of_device(name)
    return read_cluster(preset_path(preset), preset).device if preset else None


def preset_of_device(name: str) -> str:
    """Return the bundled cluster of the device that a driver's name (``NVIDIA H200``, ``NVIDIA A100-SXM4-80GB``) stands for; the
    empty text where there is none."""
    parts = name.upper().replace("-", " ").split()
    for preset in sorted(presets(), key=lambda each: not each.startswith("dgx")):  # of one device the maker's own machine
        device = read_cluster(preset_path(preset), preset).device
        *words, size = device.name.upper().split()
        model = [word for word in words if not word.startswith("SXM")]  # which drivers leave out
        if all(word in parts for word in model) and "PCIE" not in parts and (model[0] not in ("A100", "V100") or size in parts):
            return preset
    return ""


def _timings(kind: str, run: CalibrationRun, dot: str = ".") -> list[Timing]:
    return [each for each in run.operations if each.name.startswith(f"{kind}{dot}")]


def _transcendental_seconds(measured: Sequence[Timing], bytes_per_second: float) -> float:
    """Return the seconds per element of a forward, a third of forward and backward but for five accesses of four bytes."""
    return max(
        0.0, *((each.seconds / each.work - 20.0 / bytes_per_second) / (1 + TRANSCENDENTAL_BACKWARD) for each in measured), 0.0
    )


def _reached_fraction(measured: Sequence[Timing], peak: float) -> float:
    """Return the geometric mean of the rates over the peak, to four digits; at most 1."""
    mean = exp(sum(log(each.rate) for each in measured) / len(measured))
    return float(f"{min(1.0, mean / peak):.4g}")


def _host_memory(run: CalibrationRun) -> OffloadTarget | None:
    read_rate, write_rate = ([each.rate for each in run.operations if each.name == f"host.{way}"] for way in ("read", "write"))
    if not read_rate:
        return None
    return OffloadTarget("host", float(run.facts["host_bytes"]), read_rate[0], write_rate[0], 1e-5)


def predicted_seconds(link: Link, size: int, launch_seconds: float, each: Timing) -> float:
    """Return the seconds of a collective among `size` neighbours on one link, by the alpha-beta model."""
    link = replace(link, measured=())
    return collective_seconds(each.name, each.work, AxisLink(size, (Level(link, size),), launch_seconds, ("ring",)))


def fit_link(link: Link, size: int, launch_seconds: float, run: Sequence[Timing], small_protocol: bool) -> Link:
    """Fit latency and bandwidth from the all-reduces. Each other kind may differ from its formula by two constant factors, of
    latency and of transfer. What was measured of each kind goes along, since plans are priced by it."""
    reduced = [each for each in run if each.name == "all_reduce"]
    unit = replace(link, latency_seconds=1.0, bandwidth_bytes_per_second=1.0)
    latency, transfer = _fit_alpha_beta(unit, size, launch_seconds, reduced)
    fitted = replace(link, latency_seconds=latency, bandwidth_bytes_per_second=1.0 / transfer)
    if small_protocol:
        fitted = _fit_two_protocols(fitted, size, launch_seconds, reduced)
    factors = []
    for kind in dict.fromkeys(each.name for each in run if each.name != "all_reduce"):
        pair = _fit_alpha_beta(fitted, size, launch_seconds, [each for each in run if each.name == kind])
        factors.append((kind, float(f"{pair[0]:.3g}"), float(f"{pair[1]:.3g}")))
    return replace(fitted, factors=tuple(factors), measured=measured_tables(size, run))


def measured_tables(width: int, run: Sequence[Timing]) -> tuple[MeasuredCollective, ...]:
    """Return the table of each kind among `width` neighbours (or as many as a timing says) that was timed with several message
    sizes. Seconds that fall from one size to a larger one are noise, which is averaged."""
    points: dict[tuple[str, int], dict[float, float]] = {}
    for each in run:
        points.setdefault((each.name, each.width or width), {})[each.work] = float(f"{each.seconds:.6g}")
    return tuple(MeasuredCollective(*which, rising(found.items())) for which, found in points.items() if len(found) > 1)


def _fit_alpha_beta(link: Link, size: int, launch_seconds: float, run: Sequence[Timing]) -> tuple[float, float]:
    """Return (x, y) so that ``launch + x latency + y transfer`` is nearest to the measurements, in squares of relative errors;
    both are at least a thousandth of their share, since a measurement may say anything."""
    kind = run[0].name
    algorithm = "direct" if kind in ("all_to_all", "point_to_point") else "ring"
    cost = algorithm_cost(kind, algorithm, "", AxisLink(size, (Level(link, size),), 0.0, ("ring",)))
    a = [cost.latency_seconds / each.seconds for each in run]
    b = [cost.seconds_per_byte * each.work / each.seconds for each in run]
    t = [max(0.01, 1.0 - launch_seconds / each.seconds) for each in run]
    aa, ab, bb, at, bt = (sum(map(mul, x, y)) for x, y in ((a, a), (a, b), (b, b), (a, t), (b, t)))
    determinant = aa * bb - ab * ab
    x, y = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    return (max(x, 1e-3 * at / aa), bt / bb) if x <= 0 else (at / aa, 1e-3 * bt / bb) if y <= 0 else (x, y)


def descend(
    loss: Callable[[Mapping[str, float]], float],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    step: float = 0.2,
) -> dict[str, float]:
    """Return the positive numbers with the least loss, each within its bounds: coordinate descent in logarithms, also along pairs
    of numbers that move against each other. `step`: the first one."""
    best, least = dict(start), loss(start)
    moves = [{name: sign} for name in start for sign in (1, -1)]
    moves += [{one: 1, two: -1} for one in start for two in start if one != two]
    while step > 0.005:
        for move in moves:
            tried = dict(best)
            for name, sign in move.items():
                low, high = bounds.get(name, (0.0, inf))
                tried[name] = min(high, max(low, best[name] * exp(sign * step)))
            value = loss(tried)
            if value < least - 1e-6:
                best, least = tried, value
                break
        else:
            step /= 2
    return best


def _fit_two_protocols(link: Link, size: int, launch_seconds: float, run: Sequence[Timing]) -> Link:
    """Return the four numbers of two protocols with the least sum of ``|log(predicted / measured)|``."""
    numbers = {
        "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second,
        "latency_seconds": 2 * link.latency_seconds,
        "low_latency_bandwidth_bytes_per_second": link.bandwidth_bytes_per_second / 2,
        "low_latency_seconds": link.latency_seconds,
    }

    def error(trial: Mapping[str, float]) -> float:
        trial_link = replace(link, **trial)  # type: ignore[arg-type]
        return sum(abs(log(predicted_seconds(trial_link, size, launch_seconds, each) / each.seconds)) for each in run)

    # by factors of two at first: protocols differ by so much
    return replace(link, **descend(error, numbers, step=0.7))  # type: ignore[arg-type]


def calibration_document(calibration: Calibration, source: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the YAML file: the cluster in human units, and the measurements under ``source`` (not read again)."""
    rows = {each.name: f"{each.rate / 1e9:.4g} G/s, {each.seconds * 1e6:.4g} us" for each in calibration.run.operations}
    sent = {
        f"{each.name} {each.work:.0f} B": f"{each.seconds * 1e6:.4g} us, predicted {ratio * each.seconds * 1e6:.4g}"
        for each, ratio in zip(calibration.run.collectives, calibration.ratios, strict=True)
    }
    how = {**source, "slowdown": round(calibration.run.slowdown, 2), "spread": round(calibration.run.spread, 3)}
    parts = {f"{what} took": f"{seconds:.1f} s" for what, seconds in calibration.run.parts}
    return {**in_human_units(calibration.cluster.to_dict()), "source": {**how, **parts, **rows, **sent}}
