"""The usual loop of accelerate: the same on four processes as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from torch.utils.data import DataLoader, IterableDataset

SCRIPT = Path(__file__).parent / "accelerate_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def found(words: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    return report(done.stdout)


def report(text: str) -> dict[str, Any]:
    return json.loads(next(line for line in text.splitlines() if line.startswith("FOUND"))[6:])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "force",
    [
        pytest.param("dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("dp=4,zero=3", marks=pytest.mark.slow),
        pytest.param("pp=2,dp=2", marks=pytest.mark.slow),
    ],
)
def test_the_usual_loop(force: str) -> None:
    """Accumulation, clipping, a scheduler, a last batch that does not divide; the optimizer is made before the model is parallel.
    The library's own accelerator is refused with the remedy."""
    four = found([*TORCHRUN, str(SCRIPT), "--force", force])
    one = found([sys.executable, str(SCRIPT)])
    assert "do not wrap it in DistributedDataParallel" in four.pop("refused")
    for key in ("losses", "norms"):
        assert four[key] == pytest.approx(one[key], rel=1e-5), key
    assert four["weights"] == pytest.approx(one["weights"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=2,tp=2", "dp=4,zero=3", "pp=2,dp=2"])
def test_fp16_follows_float32(force: str) -> None:
    """With the accelerator's loss scaler; norms are those of unscaled gradients."""
    four = found([*TORCHRUN, str(SCRIPT), "--force", force, "--fp16"])
    one = found([sys.executable, str(SCRIPT)])
    for key in ("losses", "norms"):
        assert four[key] == pytest.approx(one[key], rel=5e-3) and four[key] != one[key], key
    assert four["weights"] == pytest.approx(one["weights"], rel=1e-3) and four["scale"] == 2.0**16


def test_all_ranks_read_alike_and_one_writes(ranks: RankPool, tmp_path: Path) -> None:
    """A sampler by the accelerator's numbers raised on rank 1, a stream was read on rank 0 alone, functions of the main process
    ran on every rank, and nobody waited for it."""
    ended = launch(ranks, SCRIPT, 4, "--force", "dp=4", "--ranks", str(tmp_path))
    assert all(each.status == 0 for each in ended), ended[-1].stderr[-6000:]
    main, *others = (report(each.stdout) for each in ended)
    assert main["ran"] == ["on_main_process", "on_last_process", "on_local_main_process", "on_process"]
    alike = {"rows": list(range(8)), "read": [[0, 1, 2, 3], [4, 5, 6, 7]], "files": ["profile_0.json", "saved.pt"]}
    alike |= {"stops": [True, False]}
    assert main == alike | {"ran": main["ran"], "last": True}
    assert others == [alike | {"ran": [], "last": False}] * 3


def test_fp8_is_refused_with_the_remedy() -> None:
    from autopar.errors import AutoparError
    from autopar.integrations.accelerate import Accelerator

    with pytest.raises(AutoparError, match="mixed_precision='fp8'.*take \"bf16\"") as refused:
        Accelerator(cluster="local:4", mixed_precision="fp8", cpu=True)
    assert "\n" not in str(refused.value)


def test_two_models_are_refused_with_the_remedy() -> None:
    from autopar.errors import AutoparError
    from autopar.integrations.accelerate import Accelerator

    student, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(AutoparError, match=r"leave out what does not \(a frozen teacher\), which may stay plain"):
        Accelerator(cluster="local:4", cpu=True).prepare(student, teacher)


class Rows(IterableDataset[torch.Tensor]):
    """Has no length, and a last batch that is smaller."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(21.0))


def test_the_last_batch_of_a_stream_counts_by_its_examples() -> None:
    """What the Trainer does with the loss of each batch: repeated for each example of a batch, then the mean."""
    import accelerate

    from autopar.integrations.accelerate import Accelerator

    numbers = []
    for accelerator in (Accelerator(cluster="local:4", cpu=True), accelerate.Accelerator(cpu=True)):
        loader = accelerator.prepare(DataLoader(Rows(), 6))
        numbers.append([accelerator.gather_for_metrics(batch.mean().repeat(6)).tolist() for _ in range(2) for batch in loader])
    assert numbers[0] == numbers[1] and [len(each) for each in numbers[0]] == [6, 6, 6, 3] * 2
