"""A Lightning script: the same on four processes as with the library's own strategy on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.harness.comparison import same_report

pytest.importorskip("lightning", reason="an optional extra: pip install autopar[lightning]")

SCRIPT = Path(__file__).parent / "lightning_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def run(words: list[str]) -> None:
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("force", "other"), [("dp=2,tp=2", "dp=4,zero=3"), ("dp=4,zero=3", "pp=2,dp=2"), ("pp=2,dp=2", "dp=2,tp=2")]
)
def test_a_lightning_script(tmp_path: Path, force: str, other: str) -> None:
    """Fit with accumulation, clipping, a schedule and a last batch that does not divide; validation, prediction, the best
    checkpoint; its file is that of the plain module; a run that resumes under another plan."""
    run([*TORCHRUN, str(SCRIPT), str(tmp_path / "four"), "--force", force, "--resume", other])
    run([sys.executable, str(SCRIPT), str(tmp_path / "one"), "--resume", "yes"])
    one, four = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("one", "four"))
    same_report(four, one, floor=1e-7)


def test_what_is_not_for_a_parallel_model_is_refused() -> None:
    """Before anything is planned."""
    import lightning.pytorch as pl
    import torch
    from torch import nn

    from autopar.errors import AutoparError
    from autopar.integrations.lightning import AutoparStrategy

    class Task(pl.LightningModule):
        def __init__(self, parts: int) -> None:
            super().__init__()
            for number in range(parts):
                self.add_module(f"part{number}", nn.Linear(2, 2))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.part0(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def refused(parts: int, match: str, precision: str = "32-true", **options: Any) -> None:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        keywords: dict[str, Any] = dict.fromkeys(quiet, False) | {"accelerator": "cpu", "devices": 1, "precision": precision}
        trainer = pl.Trainer(**keywords, strategy=AutoparStrategy(cluster="local:1", **options))
        with pytest.raises(AutoparError, match=match):
            trainer.fit(Task(parts), torch.utils.data.DataLoader(torch.ones(4, 2)))

    refused(1, "AutoparStrategy.example_inputs=")
    refused(2, "has 2 parts with parameters .part0, part1.")
    refused(2, "Task.part1.weight is outside of part0", module="part0")
    refused(1, 'take parallelize={"precision": "bf16"}', precision="bf16-mixed")
