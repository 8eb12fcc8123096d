"""``autopar calibrate --report``: the whole path on this machine's CPU; what fails or hangs is a line, and the rest goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autopar.capture.models import bundled_models
from autopar.cli import main
from autopar.cost_models.calibrate import local_cluster as local
from autopar.cost_models.calibrate.fit import Calibration, preset_of_device
from autopar.cost_models.calibrate.local_cluster import default_local_cluster
from autopar.cost_models.calibrate.measure import CalibrationRun, Timing
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster, preset_with_devices
from autopar.cost_models.hardware.device_specs import AxisLink, Level
from autopar.machine_report import report as module
from autopar.machine_report.cases import Case, StepCase, cases, step_case, verify_case
from autopar.machine_report.report import (
    MachineReport,
    calibrated,
    constants,
    our_cluster,
    planned_cases,
    run_case,
    step_rows,
    with_cases,
)
from autopar.machine_report.step import plan_case

NAMES = ("gemm.float32.8x8x8", "gemm.float32.4x4x4", "attention.float32.8", "stream.add", "launch.chain")
FACTS = {"kind": "cpu", "name": "toy process", "memory_bytes": 2**30, "base_bytes": 2**20}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the waiting."""
    operations = tuple(Timing(name, 64.0, 1e-6) for name in NAMES)
    sent = tuple(Timing(kind, size, 1e-4 + size * 1e-9) for kind in ("all_reduce", "all_gather") for size in (1e4, 1e7))
    found = CalibrationRun(FACTS, operations, sent, 1.0)
    monkeypatch.setattr(local, "measure_ranks", lambda processes, effort, progress: found)


def few(gpus: int, device: str, found: Calibration | None) -> Iterator[Case]:
    cluster = default_local_cluster(2).to_dict()
    yield step_case(StepCase("mlp", None, 2, precision="float32", step_seconds=0.01), cluster)
    yield step_case(StepCase("no-such-model", None, 2), cluster)


def test_what_fails_is_a_line(
    measured: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has the cluster, the constants, and each case; and the cluster file is one to plan for."""
    monkeypatch.setattr(module, "planned_cases", few)
    path, cluster = tmp_path / "report.json", tmp_path / "cluster.yaml"
    assert main(["calibrate", "--report", str(path), "-o", str(cluster), "--processes", "2"]) == 1
    out, _ = capsys.readouterr()
    document = json.loads(path.read_text())
    ran, failed = document["cases"]
    assert ran["device"] == "cpu" and ran["parts"]["compute"]["measured"] > 0 < ran["parts"]["compute"]["predicted"]
    assert ran["parts"]["peak_bytes"]["measured"] == pytest.approx(ran["parts"]["peak_bytes"]["predicted"], rel=0.25)
    assert "no-such-model" in failed["failed"] and failed["failed"] in document["failures"][0]
    assert f"failed: step {failed['name']}" in out and "mlp, 1 of 2" in out and "matrix products, float32" in out
    assert [each["name"] for each in document["constants"]][-1] == "all_gather of 10000000 bytes over 2"
    assert Cluster.parse(str(cluster)).size == 2 and document["cluster"]["device"]["name"] == "toy process"
    assert msgspec.convert(document["run"], CalibrationRun).collectives[0].name == "all_reduce"


def test_a_calibration_that_fails_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> CalibrationRun:
        raise RuntimeError("no driver")

    monkeypatch.setattr(local, "measure_ranks", broken)
    assert main(["calibrate", "--report", str(tmp_path / "report.json"), "--minutes", "1e-9", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["failures"] == ["calibration: RuntimeError: no driver"] and document["constants"] == []
    assert len(document["cases"]) > 10 and all("minutes was spent" in each["left_out"] for each in document["cases"])


def test_minutes_end_the_list_between_cases() -> None:
    listed = [Case("step", str(number), ()) for number in range(3)]
    kept: list[int] = []
    report = calibrated("toy process", 1, None, None, "")
    done = with_cases(report, listed, 60.0, str, lambda each: kept.append(len(each.cases)), run=lambda case: {"parts": {}})
    assert kept == [1, 2, 3] and not done.failures and not any("left_out" in each for each in done.cases)
    left = with_cases(report, listed, -1.0, str, lambda each: None, run=lambda case: {})
    assert all("left_out" in each for each in left.cases) and not list(step_rows(left.cases))


def test_what_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CASE_LIMIT_SECONDS", 0.5)
    hang = run_case(Case("step", "hang", (sys.executable, "-c", "import time; time.sleep(60)")))
    assert "took over" in hang["failed"] and hang["took_seconds"] < 30
    monkeypatch.undo()
    crash = run_case(Case("step", "crash", (sys.executable, "-c", "raise SystemExit('no memory')")))
    assert crash["failed"] == "no memory"
    refused = run_case(Case("verify", "refused", (sys.executable, "-c", 'print(\'{"error": {"message": "why"}}\')')))
    assert refused["failed"] == "why"


def test_constants_that_hold_have_a_ratio_of_one() -> None:
    """And what is half as fast is one half."""
    ours = preset_with_devices("dgx-h100", 8)
    axis = AxisLink(8, (Level(ours.links[0], 8),), ours.device.launch_seconds, ours.algorithms)
    sent = tuple(Timing("all_reduce", size, collective_seconds("all_reduce", size, axis)) for size in (1e5, 1e8))
    run = CalibrationRun({"name": "NVIDIA H100 80GB HBM3"}, (), sent, 1.0)
    assert {each.ratio for each in constants(ours, Calibration(ours, run, ()))} == {1.0}
    slower = replace(ours.device, attention_fraction=ours.device.attention_fraction / 2)
    rows = {each.name: each.ratio for each in constants(ours, Calibration(replace(ours, device=slower), run, ()))}
    assert rows.pop("attention, bfloat16") == pytest.approx(0.5) and set(rows.values()) == {1.0}


def test_devices_of_which_no_preset_is_known() -> None:
    assert preset_of_device("NVIDIA H200") == "dgx-h200" and preset_of_device("toy") == ""
    assert our_cluster("toy", 8) is None
    cluster = replace(default_local_cluster(1), size=1)
    found = Calibration(cluster, CalibrationRun(FACTS, (), (), 1.0), ())
    report = calibrated("toy", 1, found, None, "")
    assert "predicted by what was measured" in report.failures[0] and not report.constants
    jobs = [json.loads(each.command[-1]) for each in planned_cases(1, "toy", found) if each.kind == "step"]
    assert all(Cluster.from_dict(job["cluster"]).device == cluster.device for job in jobs) and len(jobs) > 8
    assert {each.kind for each in planned_cases(1, "toy", None)} == {"verify"}


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_cases_are_of_bundled_models(gpus: int) -> None:
    steps = [each for each in cases(gpus) if isinstance(each, StepCase)]
    checked = [each for each in cases(gpus) if not isinstance(each, StepCase)]
    assert len({each.model for each in steps}) == 8 and len({each.name for each in steps}) == len(steps)
    assert {each.model for each in steps} | {model for model, _, _ in checked} <= set(bundled_models())
    assert all(each.devices % (each.tp * each.pp) == 0 for each in steps)
    assert {each.recompute for each in steps if each.compiler} == {"none", "full", "selective"}
    assert any(each.offload and each.compiler for each in steps)
    assert {ranks for _, ranks, _ in checked} == {2 if gpus == 0 else gpus}
    assert "llama-tiny on" in verify_case(*checked[0]).name


@pytest.mark.slow
@pytest.mark.parametrize("case", [each for each in cases(1) if isinstance(each, StepCase)], ids=lambda each: each.name)
def test_steps_fit_the_device(case: StepCase) -> None:
    """By our constants, on the smallest of the devices that are likely to be lent. (Six of the models were run dry on fakes
    once, a minute each, and took what is predicted within a quarter.)"""
    plan = plan_case(case, preset_with_devices("dgx-h100", case.devices))
    predicted = plan.document.predicted
    assert predicted.peak_memory_bytes is not None and predicted.peak_memory_bytes < 0.7 * 80e9
    assert plan.document.cluster.compiled == bool(case.compiler)
    assert bool(case.offload) == any(block.offload for block in plan.candidate.blocks)


@pytest.mark.slow
def test_really(tmp_path: Path) -> None:
    """Everything, on this machine's CPU: every model is measured beside its prediction, and equals one process."""
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "autopar", "calibrate", "--report", str(path), "--processes", "2", "--minutes", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(path.read_text())
    assert document["failures"] == [] and all(each["ratio"] > 0 for each in document["constants"] if each["ratio"] is not None)
    verified = [each for each in document["cases"] if each["kind"] == "verify"]
    assert len(verified) == 6 and all(each["passed"] for each in verified)
    memory = [row for row in step_rows(document["cases"]) if row[1] == "peak_bytes" and "offloaded" not in row[0]]
    assert len(memory) >= 13
    for name, _, predicted, seen in memory:
        assert predicted and seen and seen == pytest.approx(predicted, rel=0.35), name


def test_the_file_says_its_schema() -> None:
    assert MachineReport("toy", (), None, None).document()["schema"] == 1
