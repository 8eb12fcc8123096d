"""``autopar calibrate``: the file that it writes is a cluster that ``--cluster`` reads; bad targets are one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from autopar.cli import main
from autopar.cost_models.calibrate import local_cluster as local
from autopar.cost_models.calibrate.measure import CalibrationRun, Timing
from autopar.cost_models.hardware.cluster import Cluster


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the waiting."""
    names = ("gemm.float32.8x8x8", "gemm.float32.4x4x4", "attention.float32.8", "stream.add", "launch.chain")
    operations = tuple(Timing(name, 64.0, 1e-6) for name in names)
    sent = tuple(Timing(kind, size, 1e-4 + size * 1e-9) for kind in ("all_reduce", "all_gather") for size in (1e4, 1e7))
    facts = {"kind": "cpu", "name": "toy", "memory_bytes": 2**30, "base_bytes": 2**20}
    monkeypatch.setattr(local, "measure_ranks", lambda processes, effort, progress: CalibrationRun(facts, operations, sent, 2.0))


def test_writes_a_cluster(measured: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    assert main(["calibrate", "-o", str(path), "--processes", "4"]) == 0
    out, err = capsys.readouterr()
    assert "all_gather" in out and f"--cluster {path}" in out
    assert "measure again with `autopar calibrate` (things took 2.0 times" in err
    cluster = Cluster.parse(str(path))
    assert cluster.size == 4 and cluster.device.name == "toy" and cluster.device.memory_bytes == 2**30
    assert main(["calibrate", "-o", str(path), "--processes", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == str(path) and Cluster.from_dict(document["cluster"]).size == 4


@pytest.mark.parametrize("target", ["cluster.json", "missing/cluster.yaml", "folder.yaml"])
def test_bad_targets(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.yaml").mkdir()
    assert main(["calibrate", "-o", str(tmp_path / target)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("autopar: error: ") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_really(processes: int, tmp_path: Path) -> None:
    """Under a minute for four ranks on two cores with nothing else to do; the processor time counts here."""
    path, start = tmp_path / "cluster.yaml", time.monotonic()
    command = [sys.executable, "-m", "autopar", "calibrate", "-o", str(path), "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=320)
    assert done.returncode == 0, done.stderr
    elapsed, busy = time.monotonic() - start, yaml.safe_load(path.read_text())["source"]["slowdown"]
    assert elapsed / busy < 60
    cluster = Cluster.parse(str(path))
    assert cluster.size == processes and cluster.device.memory_bytes > 2**28
    assert 1e8 < cluster.device.peak_flops_per_second("float32") < 1e15
