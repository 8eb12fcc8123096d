"""What is written runs unedited where a CPU can run it: DeepSpeed's ZeRO, the Trainer and accelerate's FSDP2 on four gloo
processes, and the peak of tensors is what was predicted. DeepSpeed needs the packages of `test_accepted`; it builds an extension.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.software import FOLDER

from autopar.cost_models.hardware.allocator import NOT_TENSORS
from autopar.cost_models.hardware.cluster import Cluster
from autopar.software.choose import choose, files_of
from autopar.software.known.accelerate import ON_DEVICES
from autopar.software.known.registry import known_software
from autopar.software.models import model_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "software" / "train.py"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
LLAMA = {
    **{"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512, "tie_word_embeddings": False},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
CLOSE = 0.05
SEQ, BATCH = 256, 32


def prepared(name: str, zero: int, folder: Path, device: bool = False) -> tuple[Path, float, int]:
    """(the file that is written, the predicted peak of tensors, sequences of a micro-batch) of a software with this ZeRO stage.
    `device`: as for devices that the software has all of its state sharding for."""
    sizes = folder / "config.json"
    sizes.write_text(json.dumps(LLAMA))
    software = known_software()[name]
    space = replace(
        software.space, zero=(zero,), recompute=("none",), offload=(False,), tensor=False, context=False, hybrid=False
    )
    rules = tuple(rule for rule in software.rules if not (device and rule.source == ON_DEVICES))
    model = model_of(str(sizes), SEQ, lambda *_: pytest.fail("captured"))
    found = choose(replace(software, space=space, rules=rules), model, Cluster.parse("local:4"), BATCH, "fp32")
    best = found.ranking.best
    assert best is not None and best.configuration.zero == zero
    if device:
        found = replace(found, job=replace(found.job, cpu=False))
    path = folder / software.file
    path.write_text(files_of(found, best)[software.file])
    table = best.evaluation.stage_memory[0].table
    peak = sum(size for kind, size in table.items() if kind not in NOT_TENSORS)
    return path, peak, best.configuration.micro


def measured(name: str, path: Path, launcher: list[str], micro: int) -> int:
    """The peak of tensors on four processes."""
    sizes = str(path.with_name("config.json"))
    command = [sys.executable, "-m", *launcher, str(SCRIPT), name, str(path), sizes, str(SEQ), str(micro)]
    environment = os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(
        command, env=environment, cwd=path.parent, capture_output=True, text=True, timeout=580, check=False
    )  # fmt: skip
    found = re.search(r"^peak (\d+)", run.stdout, re.MULTILINE)
    assert found is not None, run.stderr[-3000:]
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_takes_the_memory_that_is_predicted(zero: int, tmp_path: Path) -> None:
    if not (FOLDER / "deepspeed").is_dir():
        pytest.skip(f"no deepspeed in {FOLDER}: see tests/support/software/requirements.txt")
    path, predicted, micro = prepared("deepspeed", zero, tmp_path)
    assert abs(predicted / measured("deepspeed", path, TORCHRUN, micro) - 1) <= CLOSE


@pytest.mark.slow
def test_the_trainer_takes_the_memory_that_is_predicted(tmp_path: Path) -> None:
    """On CPUs without FSDP, which accelerate has for devices alone."""
    path, predicted, micro = prepared("transformers", 0, tmp_path)
    assert abs(predicted / measured("transformers", path, TORCHRUN, micro) - 1) <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_accelerate_s_fsdp_takes_the_memory_that_is_predicted(zero: int, tmp_path: Path) -> None:
    """With the file for devices, started by accelerate's own launcher; on a CPU, whose kind the script names a device's."""
    path, predicted, micro = prepared("accelerate", zero, tmp_path, device=True)
    launcher = ["accelerate.commands.launch", "--config_file", str(path)]
    assert abs(predicted / measured("accelerate", path, launcher, micro) - 1) <= CLOSE
