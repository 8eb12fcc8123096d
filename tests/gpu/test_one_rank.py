"""One rank's program on one GPU: the time that it computes and the peak of its memory, beside what was predicted for that GPU.

Collectives send nothing here, so what is compared is computing and the optimizer, not the step. Without a CUDA device, or on
one that no preset describes, there is nothing to compare and the tests are skipped; that the measurement itself runs is tested
on any machine.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.plan_file.plan_file import Plan

SCRIPT = Path(__file__).parents[1] / "support" / "harness" / "one_rank_step.py"
PRESETS = {
    "V100": "dgx-v100:1",
    "A100-SXM4-40": "dgx-a100-40:1",
    "A100": "dgx-a100:1",
    "H100": "dgx-h100:1",
    "H200": "dgx-h200:1",
    "B200": "dgx-b200:1",
}
"""By a part of the device's name; the first that matches."""

CASES = (
    ("gpt2", 64, 1024, "dp=8,zero=3"),
    ("gpt2", 64, 1024, "dp=8,zero=0"),
    ("gpt2", 32, 1024, "dp=4,tp=2,zero=1"),
    ("llama3-8b", 8, 2048, "dp=1,tp=8"),
)
SECONDS, BYTES = 0.25, 0.10
"""Relative errors that are allowed."""


def preset() -> str:
    """The cluster of this machine's GPU; skips the test where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch.cuda.is_available() is False")
    name = torch.cuda.get_device_name()
    found = next((cluster for part, cluster in PRESETS.items() if part in name), None)
    if found is None:
        pytest.skip(f"no preset describes a {name}: write one, or calibrate")
    return found


def planned(model: str, batch: int, seq: int | None, force: str, cluster: str, dtype: str) -> Plan:
    loaded = load_model(model, batch, seq, device="meta")
    return autopar.plan(loaded.model, cluster, loaded.example_inputs, batch=batch, seq=seq, precision=dtype, force=force)


def measured(plan: Plan, folder: Path, steps: int) -> dict[str, Any]:
    """By a process of its own, as a rank would be."""
    plan.save(folder / "plan.json")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "plan.json"), str(steps)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("model", "batch", "seq", "force"), CASES)
def test_computing_and_peak_memory_are_as_predicted(model: str, batch: int, seq: int, force: str, tmp_path: Path) -> None:
    name = preset()
    cluster, plan = Cluster.parse(name), planned(model, batch, seq, force, name, "bf16")
    predicted = evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer)
    found = measured(plan, tmp_path, 10)
    seconds, peak = predicted.compute_seconds + predicted.optimizer_seconds, predicted.stage_memory[0].tensor_bytes
    assert found["peak_bytes"] == pytest.approx(peak, rel=BYTES)
    assert found["seconds"] == pytest.approx(seconds, rel=SECONDS)


@pytest.mark.slow
def test_the_measurement_itself_runs_anywhere(tmp_path: Path) -> None:
    found = measured(planned("gpt2-tiny", 8, None, "dp=2,tp=2,zero=3", "local:4", "float32"), tmp_path, 2)
    assert math.isfinite(found["seconds"]) and 0 < found["optimizer_seconds"] < found["seconds"]
    assert (found["peak_bytes"] > 0) == (found["device"] != "cpu")
