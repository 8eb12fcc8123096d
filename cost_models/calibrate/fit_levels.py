"""The fit of a cluster of several levels of links to what `joined_ranks` measured: each level by the collectives among neighbours
on it. Those of all ranks together are predicted from the levels, not fitted: their errors say how far the levels explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.calibrate.fit import (
    Calibration,
    calibration_note,
    fit_device,
    fit_link,
    measured_overlap,
    measured_tables,
    predicted_seconds,
)
from autopar.cost_models.calibrate.measure import WIRE_BYTES, LevelRuns, Timing
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Link
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.ir.mesh import Axis, Mesh


def _without_bursts(run: Sequence[Timing]) -> list[Timing]:
    """The smallest message of each kind, for the latency, and those that the link bounds: what lies between may pass within the
    burst of a token bucket, faster than its rate."""
    smallest = {each.name: min(other.work for other in run if other.name == each.name) for each in run}
    return [each for each in run if each.work == smallest[each.name] or each.work >= WIRE_BYTES]


def fit_levels(runs: LevelRuns, day: str = "") -> Calibration:
    """Fit the cluster whose links `runs` measured on that day. The ratios are of each level's collectives, then of all ranks'
    together; the run has them all, named by their level."""
    whole, size = runs.whole, runs.levels[-1][0]
    device = fit_device(whole)
    on_gpu = device.kind == "cuda"
    links: list[Link] = []
    timings: list[Timing] = []
    ratios: list[float] = []
    inside = 1
    for devices, run in runs.levels:
        width = devices // inside
        wire = devices > size // runs.nodes
        name = f"network{devices}" if wire else "nvlink" if on_gpu else "loopback"
        fitted = _without_bursts(run.collectives) if wire else run.collectives
        link = fit_link(Link(name, devices, 1e9, 1e-6), width, device.launch_seconds, fitted, on_gpu)
        link = replace(link, measured=measured_tables(width, run.collectives))
        links.append(link)
        timings += [replace(each, name=f"{each.name} over {name}") for each in run.collectives]
        ratios += [predicted_seconds(link, width, device.launch_seconds, each) / each.seconds for each in run.collectives]
        inside = devices
    cluster = Cluster(
        f"measured:{runs.nodes}x{size // runs.nodes}",
        device,
        tuple(links),
        size,
        algorithms=("ring", "tree", "switch") if on_gpu else ("ring",),
        overlap=measured_overlap(whole),
        note=calibration_note(whole, day),
    )
    if len(links) > 1:
        axis = links_of_axis(cluster, Mesh((Axis("dp", size),)), 0)
        together = [each for each in whole.collectives if each.name != "point_to_point"]
        timings += [replace(each, name=f"{each.name} over all") for each in together]
        ratios += [collective_seconds(each.name, each.work, axis) / each.seconds for each in together]
    return Calibration(cluster, replace(whole, collectives=tuple(timings)), tuple(ratios))
