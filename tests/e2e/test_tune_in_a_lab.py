"""The race of plans on two nodes whose network is a hundredth of what the cluster's file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.network_lab import NetworkLab, why_no_lab

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan_file.plan_file import load_plan

FILE = """# claims ten times a gigabit
device:
  name: CPU process
  kind: cpu
  peak_tflops: {float32: 0.02, float64: 0.01}
  memory_gib: 2
  bandwidth_gb_per_second: 5
  launch_us: 10
  matmul_fraction: 0.8
  attention_fraction: 0.5
  bandwidth_fraction: 0.8
  base_gib: 0.25
links:
  - {name: loopback, devices: 2, bandwidth_gb_per_second: 0.7, latency_us: 100}
  - {name: ethernet, devices: 4, bandwidth_gb_per_second: 1.25, latency_us: 100}
algorithms: [ring]
size: 4
"""
PLANNING = ["gpt2-tiny", "--batch", "16"]
AGAIN = """
import json, os, sys
from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan_file.plan_file import load_plan
from autopar.tune import race
import torch

torch.manual_seed(0)
loaded = load_model("gpt2-tiny", 16, None, device="cpu")
raced = race(loaded.model, [load_plan(path) for path in sys.argv[2:]], Cluster.parse(sys.argv[1]), loaded.example_inputs, 3, 4)
if os.environ["RANK"] == "0":
    print(json.dumps([each.median_seconds for each in raced]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_kept_plan_is_never_worse_than_the_first(tmp_path: Path) -> None:
    """By more than 1 %, measured again in turn; one of three times, since others share the machine. And the file says that
    the network is slow."""
    if why_no_lab():
        pytest.skip(why_no_lab())
    cluster, first, kept, script = (tmp_path / name for name in ("c.yaml", "first.json", "kept.json", "again.py"))
    cluster.write_text(FILE)
    script.write_text(AGAIN)
    with NetworkLab(2, "100mbit") as lab:
        tune = ["-m", "autopar", "tune", *PLANNING, "--cluster", str(cluster), "--json"]
        (alone, _) = lab.torchrun(2, *tune, "-o", str(first), "--candidates", "1", "--laps", "1", "--steps", "1", timeout=300)
        cluster.write_text(FILE)
        (ended, other) = lab.torchrun(2, *tune, "-o", str(kept), "--candidates", "3", "--laps", "2", "--steps", "3", timeout=600)
        assert (alone.status, ended.status, other.status) == (0, 0, 0), ended.stderr[-2000:]
        found = json.loads(ended.stdout)
        assert found["plans"][0]["plan"] == json.loads(alone.stdout)["plans"][0]["plan"]
        assert found["learnt"]["network"] < 0.8 and Cluster.parse(str(cluster)).links[1].bandwidth_bytes_per_second < 1e9
        if load_plan(first).candidate != load_plan(kept).candidate:
            ratios: list[float] = []
            while not ratios or (min(ratios) > 1.01 and len(ratios) < 3):
                again = lab.torchrun(2, str(script), str(cluster), str(first), str(kept), timeout=600)
                before, after = json.loads(again[0].stdout)
                ratios.append(after / before)
            assert min(ratios) <= 1.01, ratios
