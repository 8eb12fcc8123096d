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
from support.software import FOLDER

from autopar.decoders.from_config import decoder_named
from autopar.software.configuration import Configuration
from autopar.software.files.text import text_of
from autopar.software.known.registry import known_software
from autopar.software.record import Job

ROOT = Path(__file__).parents[2]
ACCEPT = ROOT / "tests" / "support" / "software" / "accept.py"
SMALL = {
    "accelerate": [Configuration(zero=3, micro=2), Configuration(zero=2, tensor=2, micro=1, recompute="full")],
    "transformers": [Configuration(zero=3, micro=2, recompute="full"), Configuration(zero=0, micro=1)],
}
FULL = {
    "torchtitan": [
        *(Configuration(zero=zero, micro=micro, recompute=word) for zero in (2, 3) for micro, word in ((1, "none"), (2, "full"))),
        *(Configuration(zero=3, tensor=tensor, recompute="products") for tensor in (2, 4, 8)),
        *(Configuration(zero=3, context=context) for context in (2, 4)),
        *(Configuration(zero=2, stages=stages, tensor=2) for stages in (2, 4)),
        Configuration(zero=3, group=8),
    ],
    "megatron": [
        *(Configuration(zero=1, tensor=2, recompute=word) for word in ("none", "selective", "everything")),
        *(Configuration(zero=1, tensor=8, recompute=word) for word in ("none", "selective", "everything")),
        *(Configuration(zero=1, tensor=2, stages=2, virtual=virtual) for virtual in (1, 2, 4)),
        Configuration(zero=1, context=2),
        Configuration(zero=1, experts=8),
        Configuration(zero=1, tensor=2, experts=8),
    ],
    "deepspeed": [
        *(Configuration(zero=zero, micro=micro) for zero in range(4) for micro in (1, 2)),
        *(Configuration(zero=zero, offload=True) for zero in range(4)),
    ],
    "accelerate": [
        *(Configuration(zero=zero, recompute=word) for zero in (2, 3) for word in ("none", "full")),
        *(Configuration(zero=3, tensor=tensor) for tensor in (2, 4, 8)),
        *(Configuration(zero=3, context=context) for context in (2, 4)),
        Configuration(zero=3, group=8), Configuration(zero=3, offload=True), Configuration(zero=0),
    ],
    "transformers": [
        *(Configuration(zero=zero, micro=micro) for zero in (0, 2, 3) for micro in (1, 4)),
        *(Configuration(zero=zero, micro=micro, recompute="full") for zero in (0, 2, 3) for micro in (1, 4)),
    ],
}  # fmt: skip
PACKAGE = {"torchtitan": "torchtitan", "megatron": "megatron", "deepspeed": "deepspeed"}


def accepted(name: str, configurations: list[Configuration], folder: Path) -> list[tuple[Configuration, dict[str, Any]]]:
    """What the software's own class makes of each file."""
    package = PACKAGE.get(name, name)
    if not (FOLDER / package).is_dir() and (name in PACKAGE or importlib.util.find_spec(package) is None):
        pytest.skip(f"no {package} in {FOLDER}: {__doc__.splitlines()[-2] if __doc__ else ''}")
    software, paths = known_software()[name], []
    for number, each in enumerate(configurations):
        mixture = each.experts > 1
        model = "qwen3-30b-a3b" if mixture else "llama3-8b"
        job = Job(each, devices=64, batch=512, seq=4096, model=model, decoder=decoder_named(model, 4096))
        texts = {software.file: text_of(software.style, software.write(job)), **software.also(job)}
        path = folder / f"{number}.{software.file}"
        path.write_text(texts.get("torchtitan_arguments.txt", texts[software.file]))
        paths.append(str(path))
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "RANKS": "64", "WORLD_SIZE": "64" if name == "deepspeed" else "1"}
    command = [sys.executable, str(ACCEPT), name, *paths]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=560, check=False)
    line = next((line for line in run.stdout.splitlines() if line.startswith("accepted ")), "")
    assert line, f"{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
    return list(zip(configurations, json.loads(line.removeprefix("accepted ")), strict=True))


def compare(name: str, pairs: list[tuple[Configuration, dict[str, Any]]]) -> None:
    for each, found in pairs:
        wanted = {field: getattr(each, field) for field in Configuration.__dataclass_fields__}
        wanted |= {"batch": 512, "devices": 64, "steps": 512 // (64 * each.micro)}
        if "shards" in found:
            ranks = each.data(64) * each.context
            wanted |= {"shards": (each.group or ranks) // each.context, "replicas": ranks // (each.group or ranks)}
        assert {key: wanted[key] for key in found} == found, f"{name}: {each}"


@pytest.mark.parametrize("name", SMALL)
def test_the_installed_packages_take_what_is_written(name: str, tmp_path: Path) -> None:
    compare(name, accepted(name, SMALL[name], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_all_take_twelve_configurations(name: str, tmp_path: Path) -> None:
    assert len(FULL[name]) == 12
    compare(name, accepted(name, FULL[name], tmp_path))
