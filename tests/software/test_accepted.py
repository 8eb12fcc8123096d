"""What is written is taken by the software itself, and means the same there: its own configuration classes, in a process of
their own. Packages that nothing else needs lie in a folder of their own; without it those tests skip and say this command:

``pip install --no-deps --target ../software-packages -r tests/support/software/requirements.txt``
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.harness.rank_pool import RankPool
from support.software import FOLDER
from support.software.accept import answers

from autopar.cost_models.hardware.cluster import Cluster
from autopar.software.choose import FEW, choose
from autopar.software.configuration import Configuration
from autopar.software.files.text import text_of
from autopar.software.known.registry import known_software
from autopar.software.models import model_of
from autopar.software.record import Job

ROOT = Path(__file__).parents[2]
ACCEPT = ROOT / "tests" / "support" / "software" / "accept.py"
CASES = (
    ("llama3-8b", "dgx-h100:1", 64), ("llama3-8b", "dgx-a100:2", 128), ("llama3-70b", "dgx-h100:8", 128),
    ("llama3-70b", "dgx-b200:4", 128), ("llama3-405b", "dgx-h100:64", 1024), ("llama3-405b", "gb200-nvl72:36", 576),
    ("qwen3-0.6b", "rtx-4090:1", 64), ("qwen3-1.7b", "l40s:1", 64), ("qwen3-14b", "dgx-h200:1", 64),
    ("qwen3-32b", "mi300x:2", 64),
    ("qwen3-30b-a3b", "dgx-h100:2", 128), ("qwen3-14b", "dgx-b300:1", 128),
)  # fmt: skip
"""Models, clusters and batches: all of torchtitan's own registry, so that its configurations are there for all."""
INSTEAD = {
    ("llama3-405b", "dgx-h100:64", 1024): ("llama3-8b", "dgx-b200:1", 64),
    ("llama3-405b", "gb200-nvl72:36", 576): ("qwen3-32b", "dgx-h100:4", 128),
}
"""Cases of torchtitan in the place of those whose configuration, torchtitan's own, asks for products in float8 of a GPU."""
PACKAGE = {"torchtitan": "torchtitan", "megatron": "megatron", "deepspeed": "deepspeed"}
INSTALLED = ("accelerate", "transformers")


def jobs_of(name: str, number: int) -> list[Job]:
    """What the software is best set to for each case."""
    out = []
    for case in CASES[:number]:
        source, cluster, batch = INSTEAD.get(case, case) if name == "torchtitan" else case
        model = model_of(source, 4096, lambda *_: pytest.fail("captured"))
        found = choose(known_software()[name], model, Cluster.parse(cluster), batch, most=FEW)
        best = found.ranking.best
        assert best is not None
        out.append(found.job_of(best))
    return out


def accepted(name: str, number: int, folder: Path, ranks: RankPool) -> list[tuple[Job, dict[str, Any]]]:
    """What the software's own class makes of the file of each case. Packages that are installed are imported by a forked
    process, which has the greater part of them."""
    package = PACKAGE.get(name, name)
    if not (FOLDER / package).is_dir() and (name in PACKAGE or importlib.util.find_spec(package) is None):
        pytest.skip(f"no {package} in {FOLDER}: {__doc__.splitlines()[-2] if __doc__ else ''}")
    software, paths, jobs = known_software()[name], [], jobs_of(name, number)
    for place, job in enumerate(jobs):
        texts = {software.file: text_of(software.style, software.write(job)), **software.beside(job), **software.also(job)}
        path = folder / f"{place}.{software.file}"
        path.write_text(texts.get("torchtitan_arguments.txt", texts[software.file]))
        for file, text in software.beside(job).items():
            (folder / f"{place}.{file}").write_text(text)
        path.with_name(f"{path.name}.case").write_text(json.dumps({"devices": job.devices, "sizes": sizes_of(job)}))
        paths.append(str(path))
    if name in INSTALLED:
        return list(zip(jobs, ranks.run_alone(answers, name, paths, timeout=240), strict=True))
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, str(ACCEPT), name, *paths]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=560, check=False)
    line = next((line for line in run.stdout.splitlines() if line.startswith("accepted ")), "")
    assert line, f"{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
    return list(zip(jobs, json.loads(line.removeprefix("accepted ")), strict=True))


def sizes_of(job: Job) -> dict[str, Any]:
    """Sizes as Megatron names them."""
    assert job.decoder is not None
    each = job.decoder.sizes
    out = {"num_layers": job.decoder.layers, "hidden_size": each.hidden, "num_attention_heads": each.heads}
    out |= {"num_query_groups": each.kv_heads, "add_bias_linear": False}
    return out | ({"num_moe_experts": each.experts, "moe_router_topk": each.top_k} if each.experts else {})


def compare(name: str, pairs: list[tuple[Job, dict[str, Any]]]) -> None:
    for job, found in pairs:
        each = job.configuration
        wanted = {field: getattr(each, field) for field in Configuration.__dataclass_fields__}
        wanted |= {"batch": job.batch, "devices": job.devices, "steps": job.steps}
        if "shards" in found:
            ranks = job.data * each.context
            wanted |= {"shards": (each.group or ranks) // each.context, "replicas": ranks // (each.group or ranks)}
        assert {key: wanted[key] for key in found} == found, f"{name}: {job.model} {each}"


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_packages_take_what_is_written(name: str, tmp_path: Path, ranks: RankPool) -> None:
    compare(name, accepted(name, 2, tmp_path, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PACKAGE, *INSTALLED])
def test_all_take_twelve_cases(name: str, tmp_path: Path, ranks: RankPool) -> None:
    assert len(set(CASES)) == 12
    compare(name, accepted(name, 12, tmp_path, ranks))
