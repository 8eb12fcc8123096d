"""A script with transformers' Trainer: the same on four processes as the library's own on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.comparison import same_report
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

SCRIPT = Path(__file__).parent / "trainer_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def started(words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def found(folder: Path, force: str, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the library's own Trainer on one process, and of autopar's on four."""
    runs = {
        "one": started([sys.executable, str(SCRIPT), str(folder / "one"), *options]),
        "four": started([*TORCHRUN, str(SCRIPT), str(folder / "four"), "--force", force, *options]),
    }
    wait_for(runs)
    one, four = (json.loads((folder / name / "found.json").read_text()) for name in runs)
    return one, four


def wait_for(runs: dict[str, subprocess.Popen[str]]) -> None:
    for name, each in runs.items():
        text, _ = each.communicate(timeout=240)
        assert each.returncode == 0, f"{name}\n{text[-6000:]}"


@pytest.mark.parametrize("data", ["", "--stream"])
def test_a_trainer_script(tmp_path: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    """Losses, gradient norms, rates, evaluation with logits, prediction (of batches that do not divide), and the saved model.
    All are forked; python and torchrun themselves start those of the tests below. A stream was read on rank 0 alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = [data] if data else []
    four = launch(ranks, SCRIPT, 4, str(tmp_path / "four"), "--force", "dp=2,tp=2", *options, timeout=240.0)
    for ended in (*four, *launch(ranks, SCRIPT, 0, str(tmp_path / "one"), *options, timeout=240.0)):
        assert ended.status == 0, ended.stderr[-6000:]
    mine, theirs = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("four", "one"))
    same_report(mine, theirs)


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("activation_checkpointing", "the plan decides what is recomputed"),
        ("auto_find_batch_size", "the plan fits the memory"),
        ("fp16_full_eval", "take bf16=True"),
    ],
)
def test_what_the_plan_decides_is_refused(tmp_path: Path, setting: str, remedy: str) -> None:
    """Before anything is planned."""
    from transformers import TrainingArguments

    from autopar.errors import AutoparError
    from autopar.integrations.transformers import Trainer

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **{setting: True})
    with pytest.raises(AutoparError, match=remedy) as refused:
        Trainer(model=torch.nn.Linear(2, 2), args=args, cluster="local:4")
    assert setting in str(refused.value) or setting == "activation_checkpointing"
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--resume", "dp=2,tp=2"], ["--resume", "pp=2,dp=2"], ["--lengths"], ["--smoothing", "0.1"]], ids=" ".join
)
def test_trainer_scripts_with_sharded_state(tmp_path: Path, options: list[str]) -> None:
    one, four = found(tmp_path, "dp=4,zero=3", *options)
    same_report(four, one)


@pytest.mark.slow
def test_a_trainer_script_in_a_pipeline(tmp_path: Path) -> None:
    one, four = found(tmp_path, "pp=2,dp=2", "--resume", "dp=2,tp=2")
    same_report(four, one)


@pytest.mark.slow
@pytest.mark.parametrize(("force", "other"), [("dp=2,tp=2", "pp=2,dp=2"), ("pp=2,dp=2", "dp=4,zero=3")])
def test_adapters_of_peft(tmp_path: Path, force: str, other: str) -> None:
    """Trained, saved in peft's files, and resumed from them under another plan; with a head that is trained whole."""
    one, four = found(tmp_path, force, "--resume", other, "--lora")
    same_report(four, one)
    assert four["files"] == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_dropout(tmp_path: Path) -> None:
    """Under the plan of the first run."""
    _, four = found(tmp_path, "dp=2,tp=2", "--resume", "dp=2,tp=2", "--dropout", "0.1")
    losses = [[each["loss"] for each in four[name] if "loss" in each] for name in ("log", "resumed")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=2,tp=2", "dp=4,zero=3", "pp=2,dp=2"])
def test_fp16_follows_float32(tmp_path: Path, force: str) -> None:
    """Under a loss scaler, which is saved and loaded with the run; logged norms are those of unscaled gradients."""
    one, four = found(tmp_path, force, "--resume", "dp=2,tp=2", "--fp16")
    for name in ("log", "resumed"):
        for key in ("loss", "grad_norm"):
            mine, theirs = ([each[key] for each in run[name] if key in each] for run in (four, one))
            assert mine == pytest.approx(theirs, rel=5e-3) and mine != theirs, (name, key)
    assert four["scaler"] == [2.0**16, 6], "three steps before the checkpoint, and three after it"
