"""Calibration across nodes: known levels of links are recovered, and two nodes in network namespaces are measured by torchrun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from support.network_lab import NetworkLab, why_no_lab

from autopar.cli import main
from autopar.cost_models.calibrate.fit import calibration_document
from autopar.cost_models.calibrate.fit_levels import fit_levels
from autopar.cost_models.calibrate.joined_ranks import check_levels
from autopar.cost_models.calibrate.measure import CalibrationRun, Effort, LevelRuns, Timing, merge_ranks
from autopar.cost_models.comm.collectives import collective_seconds, explain_collective
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.errors import ClusterError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
LAUNCH = 1e-5
QUICK = Effort(1, 0.01, False, 1.0)
INSIDE = Link(
    "loopback", 2, 1e9, 2e-4, factors=(("all_gather", 0.8, 1.6), ("reduce_scatter", 1.1, 2.9), ("point_to_point", 0.5, 1.0))
)
ACROSS = Link(
    "network4", 4, 1.4e7, 5e-4, factors=(("all_gather", 1.1, 1.05), ("reduce_scatter", 1.9, 1.9), ("point_to_point", 0.1, 1.1))
)


def run_of(*levels: Level) -> CalibrationRun:
    """What these links and a small device would show."""
    operations = tuple(
        Timing(name, 64.0, 64 * LAUNCH) for name in ("gemm.float32.8", "attention.float32.8", "stream.add", "launch.chain")
    )
    axis = AxisLink(2 ** len(levels), levels, LAUNCH, ("ring",))
    sent = tuple(
        Timing(kind, size, collective_seconds(kind, size, axis)) for kind in KINDS for size in (2.0**12, 2.0**18, 2.0**22)
    )
    return CalibrationRun(
        {"kind": "cpu", "name": "toy", "memory_bytes": 2**30, "base_bytes": 2**20}, operations, sent, 1.0, contention=0.2
    )


def test_known_levels_are_recovered(tmp_path: Path) -> None:
    inner, outer = Level(INSIDE, 2), Level(ACROSS, 2)
    found = fit_levels(LevelRuns(((2, run_of(inner)), (4, run_of(outer))), run_of(inner, outer), 2), "2026-01-02")
    assert found.ratios == pytest.approx([1.0] * len(found.ratios), rel=0.01) and len(found.ratios) == 15 + 15 + 12
    assert {each.name.split(" over ")[1] for each in found.run.collectives} == {"loopback", "network4", "all"}
    for known, link in zip((INSIDE, ACROSS), found.cluster.links, strict=True):
        assert (link.name, link.devices) == (known.name, known.devices)
        assert link.bandwidth_bytes_per_second == pytest.approx(known.bandwidth_bytes_per_second, rel=0.01)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(calibration_document(found, {"measured": "today"}), sort_keys=False))
    read = Cluster.parse(str(path))
    assert read.size == 4 and [link.factors for link in read.links] == [link.factors for link in found.cluster.links]


def test_one_rank_on_each_node_has_one_level() -> None:
    found = fit_levels(LevelRuns(((2, run_of(Level(ACROSS, 2))),), run_of(Level(ACROSS, 2)), 2))
    assert [(link.name, link.devices) for link in found.cluster.links] == [("network2", 2)]


def test_factors_are_of_their_own_level() -> None:
    """Reduce-scatters that are slow inside a node leave the network as fast as it is."""
    slow = replace(INSIDE, factors=(("reduce_scatter", 1.0, 3.0),))
    fast = replace(INSIDE, factors=())
    plain = replace(ACROSS, factors=())
    times = [
        collective_seconds("reduce_scatter", 2.0**22, AxisLink(4, (Level(each, 2), Level(plain, 2)), LAUNCH, ("ring",)))
        for each in (slow, fast)
    ]
    assert times[0] == pytest.approx(times[1]) and times[0] > 2.0**22 * 0.75 / 2.8e7
    said = explain_collective("reduce_scatter", 2.0**22, AxisLink(2, (Level(slow, 2),), LAUNCH, ("ring",)))
    assert "loopback 1 x the latency and 3 x the transfer as measured" in said


def test_a_wire_is_not_faster_on_a_busy_machine() -> None:
    """What a collective waits for a slow network is the clock's; its processor time is not."""
    facts = {"kind": "cpu", "name": "x", "memory_bytes": 1, "base_bytes": 1}
    operation = {"name": "gemm.float32.8", "work": 1.0, "clock": [3.0] * 3, "own": [1.0] * 3}
    sent = {"name": "all_reduce", "work": 4.0, "clock": [8.0] * 3, "own": [0.5] * 3}
    rank = {"facts": facts, "operations": [operation], "collectives": [sent]}
    assert merge_ranks([rank], wire=True).collectives[0].seconds == pytest.approx(8.0 - 2 * 0.5)
    assert merge_ranks([rank]).collectives[0].seconds == pytest.approx(8.0 / 3)


def test_groups_that_share_a_wire_unevenly() -> None:
    """Two pairs send 1 MB each over 25 MB/s: the one that gets most of it is done after 45 ms, all bytes are after 80 ms; what
    their processors do meanwhile is not taken off."""
    facts = {"kind": "cpu", "name": "x", "memory_bytes": 1, "base_bytes": 1}
    operation = {"name": "gemm.float32.8", "work": 1.0, "clock": [3.0] * 3, "own": [1.0] * 3}
    ranks = [
        {
            "facts": dict(facts),
            "operations": [operation],
            "collectives": [{"name": "point_to_point", "work": 1e6, "clock": [seconds] * 3, "own": [0.01] * 3}],
        }
        for seconds in (0.045, 0.045, 0.08, 0.08)
    ]
    assert merge_ranks(ranks, wire=True).collectives[0].seconds == pytest.approx(0.08)


def test_levels_divide_each_other() -> None:
    assert check_levels((8,), 16) == (8, 16) and check_levels((1,), 4) == (4,) and check_levels((2, 4), 8) == (2, 4, 8)
    assert check_levels((4,), 4) == (4,)
    with pytest.raises(ClusterError, match="levels 3,8: each must be a multiple"):
        check_levels((3,), 8)


def test_launchers_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "cluster.yaml")
    assert main(["calibrate", "-o", path, "--levels", "2"]) == 2
    assert "--levels needs ranks on several nodes" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["calibrate", "-o", path]) == 2
    assert "LOCAL_RANK=''" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["calibrate", "-o", path, "--processes", "2"]) == 2
    assert "--processes is for one machine" in capsys.readouterr().err


def test_collectives_wait_for_ranks_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks share cores a collective is timed after a product, whose own seconds do not count; elsewhere alone."""
    from autopar.cost_models.calibrate import measure_rank

    now = [0.0]

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    for name in ("perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(measure_rank.time, name, lambda: now[0])
    monkeypatch.setattr(measure_rank.dist, "barrier", lambda: None)
    shared, alone = (measure_rank.RankBenchmark(torch.device("cpu"), QUICK, share, share, print) for share in (2.0, 1.0))
    assert alone.between() is None and shared.between() is not None
    product = measure_rank.TimedCall("between", 0.0, takes(6e-3), calls=2)
    task = measure_rank.TimedCall("all_reduce", 4.0, takes(5e-3), calls=3, between=product)
    assert alone.slice(task) == pytest.approx((11e-3, 11e-3))
    for each in (product, task, task):
        clock, own = alone.slice(each)
        each.clock.append(clock)
        each.own.append(own)
    assert task.to_dict()["clock"] == pytest.approx([5e-3] * 2) and task.to_dict()["own"] == pytest.approx([5e-3] * 2)
    assert alone.slice(replace(task, between=None)) == pytest.approx((5e-3, 5e-3))


@pytest.mark.parametrize(("seconds", "product", "calls", "rounds"), [
    (4.0, 0.0, 1, 2), (0.05, 0.0, 1, 8), (1e-3, 0.0, 60, 8), (1e-3, 6e-3, 23, 3), (4.0, 6e-3, 1, 2),
])  # fmt: skip
def test_what_takes_long_is_timed_twice(
    seconds: float, product: float, calls: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of 60.5 ms and at most eight rounds in half a second for each task; what is computed between counts too."""
    from autopar.cost_models.calibrate import measure_rank

    now, made = [0.0], [0]

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    def call() -> None:
        made[0] += 1
        takes(seconds)()

    for name in ("perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(measure_rank.time, name, lambda: now[0])
    for name in ("barrier", "all_reduce"):
        monkeypatch.setattr(measure_rank.dist, name, lambda *given, **named: None)
    monkeypatch.setattr(measure_rank.dist, "get_world_size", lambda: 1)
    bench = measure_rank.RankBenchmark(torch.device("cpu"), Effort(8, 0.0605, True, 0.5), 1.0, 1.0, lambda line: None)
    between = measure_rank.TimedCall("between", 0.0, takes(product)) if product else None
    task = measure_rank.TimedCall("all_reduce", 4.0, call, between=between)
    took = bench.rounds("collectives", [task], (0.0, 1.0))
    assert (task.calls, len(task.clock)) == (calls, rounds)
    assert made[0] == 2 + calls * rounds - (calls == 1)
    assert task.to_dict()["clock"] == pytest.approx([seconds] * rounds)
    assert took <= 0.5 + 3 * seconds + 20 * product + 1e-9


@pytest.mark.slow
def test_two_nodes_in_a_lab(tmp_path: Path) -> None:
    """Two nodes of two ranks over 200 Mbit/s, which the two ranks share: at most 12.5 MB/s each."""
    if why_no_lab():
        pytest.skip(why_no_lab())
    path = tmp_path / "cluster.yaml"
    with NetworkLab(2, "200mbit") as lab:
        ended = lab.torchrun(2, "-m", "autopar", "calibrate", "-o", str(path), timeout=300)
    assert [agent.status for agent in ended] == [0, 0], ended
    cluster = Cluster.parse(str(path))
    assert [link.devices for link in cluster.links] == [2, 4] and cluster.size == 4
    inside, across = (link.bandwidth_bytes_per_second for link in cluster.links)
    assert across == pytest.approx(1.25e7, rel=0.1) and inside > 10 * across
    assert "over all" in ended[0].stdout and "over" not in ended[1].stdout
    assert "measuring took" in ended[0].stdout and "s for links that join 4" in ended[0].stdout
    tables = [{each.kind: each.table.sizes[-1] for each in link.measured} for link in cluster.links]
    assert tables[0]["parameter_gather"] == 2**26 and 2**20 <= tables[1]["all_reduce"] < 2**26
