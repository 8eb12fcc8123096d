"""Calibration: known machines are recovered from what they would have shown; files are read back as they were."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autopar.cost_models.calibrate import local_cluster as local
from autopar.cost_models.calibrate.fit import (
    Calibration,
    calibration_document,
    fit_cluster,
    fit_device,
    known_device,
    measured_overlap,
)
from autopar.cost_models.calibrate.measure import CalibrationRun, Effort, Timing, measure_ranks, merge_ranks
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import in_code_units, in_human_units, presets
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.cost_models.hardware.measured_collectives import STATE_KINDS
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.errors import ClusterError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (2.0**12, 2.0**18, 2.0**22, 2.0**24)


def run_of(link: Link, kind: str = "cpu", launch: float = 1e-5, noise: float = 0.0, gpu: str = "GPU") -> CalibrationRun:
    """What a machine with this link and a 100 GFLOP/s device (80 at other shapes) would show."""
    rng = random.Random(0)
    dtype = "float32" if kind == "cpu" else "bfloat16"
    axis = AxisLink(link.devices, (Level(link, link.devices),), launch, ("ring",))
    packed = 4 / 5e9 if kind == "cpu" else 0.0
    operations = [
        Timing(f"gemm.{dtype}.512x512x512", 1e9, 1e-2 + packed * 3 * 512**2),
        Timing(f"gemm.{dtype}.256x768x768", 1e9, 1e-2 / 0.64 + packed * (768**2 + 2 * 256 * 768)),
        Timing("gemm.float64.64x64x64", 1e9, 2e-2),
        Timing(f"attention.{dtype}.256", 1e9, 2e-2),
        Timing(f"convolution.{dtype}.4x32x64x16", 1e9, 5e-3),
        Timing("stream.add", 1e9, 0.1),
        Timing("launch.chain", 64.0, 64 * launch),
        *([Timing("packed_gemm", 1e9, 4 * 2 * 16 * 2048**2 / 1e11 + 0.2)] if kind == "cpu" else []),
        *([Timing("launch.update", 160.0, 160 * 3 * launch), Timing("update.adamw", 1e9, 0.25)] if kind == "cpu" else []),
        *([Timing("pages.new", 6e7, 0.03), Timing("pages.old", 6e7, 0.01)] if kind == "cpu" else []),
        *((Timing("host.read", 1e9, 0.05), Timing("host.write", 1e9, 0.1)) if kind == "cuda" else ()),
    ]
    sent = [
        Timing(each, size, collective_seconds(each, size, axis) * (1 + noise * rng.uniform(-1, 1)))
        for each in KINDS
        for size in SIZES
    ]
    facts = {"kind": kind, "name": gpu, "memory_bytes": 2**33, "base_bytes": 2**28, "host_bytes": 2**35, "vector_bits": 512}
    return CalibrationRun(facts, tuple(operations), tuple(sent), 1.0)


def test_a_known_machine_is_recovered() -> None:
    factors = (("all_gather", 0.7, 1.5), ("reduce_scatter", 2.0, 2.5), ("all_to_all", 0.3, 1.1))
    found = fit_cluster("local:4", 4, run_of(Link("loopback", 4, 8e8, 2e-4, factors=factors)))
    (link,) = found.cluster.links
    assert (link.bandwidth_bytes_per_second, link.latency_seconds) == pytest.approx((8e8, 2e-4), rel=1e-6)
    for known, read in zip(factors, link.factors, strict=True):
        assert read[0] == known[0] and read[1:] == pytest.approx(known[1:], rel=0.01)
    assert found.ratios == pytest.approx([1.0] * 16, rel=0.01)
    device = found.cluster.device
    assert device.peak_flops_per_second("float32") == pytest.approx(2e11) and device.matmul_fraction == pytest.approx(
        0.4, rel=1e-3
    )
    assert device.product_bytes_per_second == pytest.approx(5e9, rel=0.01)
    assert device.attention_fraction * device.peak_flops_per_second("float32") == pytest.approx(5e10)
    assert device.convolution_flops_per_second("float32") == pytest.approx(2e11) and device.vector_bits == 512
    assert device.attention_fraction == pytest.approx(0.25) and device.bandwidth_bytes_per_second == pytest.approx(1e10)
    assert device.launch_seconds == pytest.approx(1e-5) and found.cluster.host is None
    assert (device.update_seconds, device.update_bytes_per_second) == pytest.approx((3e-5, 4e9))
    assert device.fresh_page_bytes_per_second == pytest.approx(3e9), "20 ms longer for 60 MB"


def test_noise_of_a_fifth_moves_the_link_by_less() -> None:
    found = fit_cluster("local:4", 4, run_of(Link("loopback", 4, 8e8, 2e-4), noise=0.2))
    (link,) = found.cluster.links
    assert (link.bandwidth_bytes_per_second, link.latency_seconds) == pytest.approx((8e8, 2e-4), rel=0.25)
    assert all(0.6 < ratio < 1.6 for ratio in found.ratios)


def test_two_protocols_of_a_gpu_node() -> None:
    """Only the all-reduces are fitted to the small protocol; each size is met within a tenth."""
    link = Link("nvlink", 8, 3e11, 6e-6, low_latency_seconds=2e-6, low_latency_bandwidth_bytes_per_second=1e11)
    found = fit_cluster("node", 8, run_of(link, "cuda", 4e-6))
    assert found.ratios[:4] == pytest.approx([1.0] * 4, rel=0.1)
    assert found.cluster.host is not None and found.cluster.host.read_bytes_per_second == pytest.approx(2e10)


def test_one_process_has_no_link_to_fit() -> None:
    run = run_of(Link("loopback", 2, 8e8, 2e-4))
    cluster = fit_cluster("local:1", 1, CalibrationRun(run.facts, run.operations, (), 1.0)).cluster
    assert cluster.size == 1 and not cluster.links and Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("driver", "preset"),
    [
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-40"),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 2080 Ti", None),
    ],
)
def test_a_known_gpu_keeps_the_peaks_of_its_sheet(driver: str, preset: str | None) -> None:
    device = known_device(driver)
    expected = Cluster.parse(preset).device if preset else None
    assert (device.peak if device else None) == (expected.peak if expected else None)
    if expected:
        found = fit_device(run_of(Link("nvlink", 8, 3e11, 6e-6), "cuda", gpu=driver))
        assert found.peak == expected.peak
        assert found.matmul_fraction == pytest.approx(8e10 / expected.peak_flops_per_second("bfloat16"), rel=1e-3)


def rank(clock: float, own: float, collective: tuple[float, float], kind: str = "cpu") -> dict[str, Any]:
    """Three rounds of one operation and one collective on one rank."""
    facts = {"kind": kind, "name": "x", "memory_bytes": 1, "base_bytes": 1}
    operation = {"name": "gemm.float32.8", "work": 1.0, "clock": [clock * f for f in (1, 1.5, 9)], "own": [own] * 3}
    sent = {"name": "all_reduce", "work": 4.0, "clock": [collective[0]] * 3, "own": [collective[1]] * 3}
    return {"facts": facts, "operations": [operation], "collectives": [sent]}


def test_other_programs_do_not_count() -> None:
    """Operations: processor time. Collectives: the clock's over how busy the machine was, at least the processors' time."""
    idle = merge_ranks([rank(2.0, 2.0, (8.0, 1.0)), rank(2.0, 2.0, (8.0, 3.0))])
    assert idle.operations[0].seconds == 2.0 and idle.slowdown == pytest.approx((1 + 1.5 + 9) / 3)
    assert idle.collectives[0].seconds == pytest.approx(max(2.0, 8.0 / idle.slowdown))
    calm = merge_ranks([rank(2.0, 23.0, (8.0, 1.0))])
    assert calm.slowdown == 1.0 and calm.collectives[0].seconds == 8.0
    late = merge_ranks([rank(20.0, 2.0, (8.0, 5.0)), rank(20.0, 2.0, (8.0, 3.0))])
    assert late.operations[0].seconds == 2.0 and late.collectives[0].seconds == 4.0
    assert merge_ranks([rank(1.0, 1.0, (1, 1), "cuda"), rank(3.0, 3.0, (1, 1), "cuda")]).operations[0].seconds == 3.0


@pytest.mark.parametrize(("kind", "contention", "gathers", "reductions"), [
    ("cpu", 0.3, False, True), ("cpu", 0.6, False, False), ("cuda", 0.6, True, True),
])  # fmt: skip
def test_what_overlaps(kind: str, contention: float, gathers: bool, reductions: bool) -> None:
    found = measured_overlap(CalibrationRun({"kind": kind}, (), (), 1.0, contention=contention))
    assert found == Overlap(contention, gradient_reduction=reductions, parameter_gather=gathers)


@pytest.mark.parametrize("name", presets())
def test_human_units_and_back(name: str) -> None:
    cluster = Cluster.parse(f"{name}:2")
    again = Cluster.from_dict(in_code_units(in_human_units(cluster.to_dict())))
    assert again.links == cluster.links and dict(again.device.peak) == pytest.approx(dict(cluster.device.peak), rel=1e-5)
    assert again.device.memory_bytes == pytest.approx(cluster.device.memory_bytes, rel=1e-5)
    assert again.overlap == cluster.overlap and again.algorithms == cluster.algorithms and again.note == cluster.note


def test_the_file_is_a_cluster(tmp_path: Path) -> None:
    link = Link("loopback", 4, 8e8, 2e-4, factors=(("reduce_scatter", 2.0, 2.5),))
    found = fit_cluster("local:4", 4, run_of(link))
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(calibration_document(found, {"measured": "today"}), sort_keys=False))
    read = Cluster.parse(str(path))
    assert read.note == found.cluster.note and "repetitions differ" in read.note
    assert read.size == 4 and read.links[0].factors == found.cluster.links[0].factors
    assert read.links[0].latency_seconds == pytest.approx(found.cluster.links[0].latency_seconds, rel=1e-5)
    assert dict(read.device.peak) == pytest.approx(dict(found.cluster.device.peak), rel=1e-5)


def fake(busy: float, spread: float, speeds: list[float]) -> Any:
    """Measures a machine with everything so many times as fast as the last time; `speeds` are used up."""

    def measure(processes: int) -> Calibration:
        speed = speeds.pop(0)
        run = run_of(Link("loopback", processes, 8e8, 2e-4))
        operations, sent = ([replace(m, seconds=m.seconds / speed) for m in each] for each in (run.operations, run.collectives))
        run = CalibrationRun(run.facts, tuple(operations), tuple(sent), busy, spread)
        return fit_cluster(f"local:{processes}", processes, run, "2026-01-02")

    return measure


def test_cache_of_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once, read back afterwards, and anew where the file is broken."""
    left = [1.0] * 9
    monkeypatch.setattr(local, "measure_local", fake(1.0, 0.1, left))
    first = Cluster.parse("local:2", tmp_path / "deep")
    assert Cluster.parse("local:2", tmp_path / "deep") == first and len(left) == 8
    (file,) = (tmp_path / "deep").iterdir()
    for broken in ("{", "{}", "[]", json.dumps({"tries": 1, "run": {}, "cluster": {}})):
        file.write_text(broken)
        assert Cluster.parse("local:2", tmp_path / "deep") == first
    assert len(left) == 4 and "measured 2026-01-02; repetitions differ by 10 %" in first.note


def aged(folder: Path, seconds: float) -> None:
    for file in folder.iterdir():
        stamp = file.stat().st_mtime - seconds
        os.utime(file, (stamp, stamp))


@pytest.mark.parametrize(("busy", "spread"), [(3.0, 0.1), (1.0, 0.9)])
def test_what_is_not_sure_is_measured_again(busy: float, spread: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten minutes, then after twenty; of all runs the fastest counts; the plan says that it is not sure."""
    left = [1.0, 2.0, 0.5]
    monkeypatch.setattr(local, "measure_local", fake(busy, spread, left))
    peaks, lines = [], []
    for age, expected in ((0, 2), (60, 2), (700, 1), (700, 1), (1300, 0), (1300, 0)):
        aged(tmp_path, age)
        cluster = local.measured_local_cluster(2, tmp_path, lines.append)
        peaks.append(cluster.device.peak_flops_per_second("float32") / 2e11)
        assert len(left) == expected and "measure again with `autopar calibrate`" in cluster.note
    assert peaks == pytest.approx([1, 1, 2, 2, 2, 2])
    assert [" once " in each for each in lines[::2]] == [True, False, False] and "had disturbed the last" in lines[2]


def test_any_measurement_grows_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2.0, 1.0]
    monkeypatch.setattr(local, "measure_local", fake(1.0, 0.0, left))
    peaks = []
    for days in (0, 20, 20):
        aged(tmp_path, days * 86400)
        peaks.append(Cluster.parse("local:2", tmp_path).device.peak_flops_per_second("float32") / 2e11)
    assert peaks == pytest.approx([2, 2, 1]) and not left


def test_runs_of_other_things_are_not_mixed() -> None:
    run = run_of(Link("loopback", 2, 8e8, 2e-4))
    fewer = replace(run, operations=tuple(replace(each, seconds=each.seconds / 2) for each in run.operations[1:]))
    assert run.faster(fewer) == run and msgspec.convert(json.loads(json.dumps(asdict(run))), CalibrationRun) == run


@pytest.mark.parametrize("disturbed", [0.0, 0.2, 0.5])
def test_disturbed_rounds_do_not_count(disturbed: float) -> None:
    """Of nine rounds some take three times as long: what counts moves by less than the noise of a tenth."""
    rng = random.Random(1)
    rounds = [1e-3 * rng.uniform(1.0, 1.1) * (3.0 if rng.random() < disturbed else 1.0) for _ in range(9)]
    run = rank(1e-3, 1e-3, (1.0, 1.0), "cuda")
    run["operations"][0].update(own=rounds, clock=rounds)
    assert merge_ranks([run]).operations[0].seconds == pytest.approx(1e-3, rel=0.11)


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are queued between two events, whose distance counts; the clock of the host does not."""
    from autopar.cost_models.calibrate import measure_rank

    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 12.0  # milliseconds

    monkeypatch.setattr(measure_rank.torch.cuda, "Event", Event)
    monkeypatch.setattr(measure_rank.torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(measure_rank.dist, "barrier", lambda: None)
    bench = measure_rank.RankBenchmark(measure_rank.torch.device("cuda", 0), Effort(1, 0.01, False, 1.0), 1.0, 1.0, print)
    task = measure_rank.TimedCall("gemm", 1.0, lambda: log.append("call"), calls=3)
    assert bench.slice(task) == pytest.approx((4e-3, 4e-3)) and log == ["wait", "event", "call", "call", "call", "event", "wait"]


@pytest.mark.slow
def test_real_ranks() -> None:
    told: list[tuple[str, float]] = []
    run = measure_ranks(2, Effort(1, 0.01, False, 5.0), lambda what, share: told.append((what, share)))
    assert any("collectives" in what for what, _ in told) and sorted(told, key=lambda each: each[1]) == told
    assert {each.name for each in run.collectives} == {*KINDS, *STATE_KINDS, "point_to_point"}
    cluster = fit_cluster("local:2", 2, run).cluster
    assert cluster.device.kind in ("cpu", "cuda") and 1e6 < cluster.links[0].bandwidth_bytes_per_second < 1e12
    assert 1e8 < cluster.device.peak_flops_per_second("float32") < 1e15


@pytest.mark.slow
def test_a_failing_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cost_models.calibrate.measure.asdict", lambda effort: {"speed": 1})
    with pytest.raises(ClusterError, match="measuring 2 processes failed .*speed.*yaml") as error:
        measure_ranks(2, Effort(1, 0.01, False, 1.0), lambda what, share: None)
    assert "\n" not in str(error.value)
