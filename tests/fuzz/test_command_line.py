"""Odd words for every option of every command: status 0, or one line and status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.capture_cache import capture_cache
from support.fuzzing.odd_words import TEXTS, commands, odd_factories, odd_files, options_of, with_word
from support.fuzzing.one_line import answer

from autopar.errors import PlanError

PLANNING = "mlp --cluster local:2 --batch 8 --force dp=2 --no-cache --time-limit 2"
POSITIONALS = {"model": 1, "plan": 1, "file": 1, "folder": 2, "measured": 2, "config": 1, "clusters": 2, "what": 1, "factory": 1}


@pytest.fixture(scope="module", autouse=True)
def captures() -> Iterator[None]:
    """Words are odd, models are not."""
    with capture_cache():
        yield


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """A command line of each command that works."""
    folder = tmp_path_factory.mktemp("command_line")
    plan = str(folder / "plan.json")
    made = answer("plan", "mlp", "--cluster", "local:4", "--batch", 32, "--force", "dp=2,tp=2,zero=3", "-o", plan)
    assert made.status == 0, made
    out = {command: [command, plan] for command in ("inspect", "explain", "dryrun", "report", "trace")}
    out |= {"plan": ["plan", *PLANNING.split()], "verify": ["verify", *PLANNING.split()], "validate": ["validate"]}
    out |= {"doctor": ["doctor", "mlp"], "compare": ["compare", plan, str(folder / "measured.json")]}
    megatron = folder / "megatron.sh"
    megatron.write_text("torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16\n")
    fitted = ["--model", "llama-tiny", "--cluster", "dgx-h100:1", "--quick"]
    out |= {"fit": ["fit", str(megatron), *fitted], "check": ["check", plan]}
    out |= {"launch": ["launch", plan, "--for", "slurm", "-o", str(folder / "jobs")]}
    out |= {"compare-clusters": ["compare-clusters", "llama-tiny", "dgx-h100:1@2", "--tokens", "1e9", "--batch", "16"]}
    out |= {"export": ["export", plan, str(folder / "out")], "calibrate": ["calibrate", "-o", str(folder / "c.yaml")]}
    by_hand = folder / "by_hand.py"
    by_hand.write_text("import torch\n\n\ndef factory():\n    return torch.nn.Linear(4, 4), {'input': torch.ones(2, 4)}\n")
    out |= {"check-module": ["check-module", f"{by_hand}:factory", "--mesh", "dp=2"]}
    out |= {"tune": ["tune", *PLANNING.split(), "-o", str(folder / "tuned.json")]}
    return out | {"models": ["models"], "clusters": ["clusters"]}


def words(folder: Path) -> tuple[list[str], list[str]]:
    return [*TEXTS, *odd_files(folder).values()], list(odd_factories(folder).values())


def attempts(lines: dict[str, list[str]], folder: Path) -> Iterator[list[str]]:
    plain, factories = words(folder)
    for command in commands():
        for option in options_of(command):
            positionals = {**POSITIONALS, "plan": 1}
            for word in [*plain, *(factories if option.dest in ("model", "factory") else [])]:
                if (command, word) not in ((("validate", "--")), ("validate", "")):
                    yield with_word(lines[command], option, positionals, word)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is measured, no process is started, and files are written into a folder of the test."""
    from autopar.cost_models.calibrate import local_cluster
    from autopar.machine_report import report
    from autopar.verification import proof

    def stop(*args: Any) -> Any:
        raise PlanError("it would run now")

    monkeypatch.setattr(proof, "spawned", stop)
    monkeypatch.setattr(local_cluster, "measure_local", stop)
    monkeypatch.setattr(report, "planned_cases", stop)
    monkeypatch.chdir(tmp_path)


def check(every: int, lines: dict[str, list[str]], folder: Path) -> int:
    count = 0
    for number, argv in enumerate(attempts(lines, folder)):
        if number % every == 0:
            said = answer(*argv)
            assert said.is_one_line, (argv, said)
            assert said.seconds < 30, (argv, said.seconds)  # many of these do what they are told
            count += 1
    return count


def test_odd_words(quick: None, lines: dict[str, list[str]], tmp_path: Path) -> None:
    assert check(97, lines, tmp_path) > 50


@pytest.mark.slow
def test_all_odd_words(quick: None, lines: dict[str, list[str]], tmp_path: Path) -> None:
    assert check(1, lines, tmp_path) > 5000


@pytest.mark.parametrize("home", ["a file", "nothing", "none", "a broken cache"])
def test_homes(quick: None, lines: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """A home that is a file, is missing, or whose cache is garbage: the plan is made all the same."""
    path = tmp_path / "home"
    if home == "a file":
        path.write_text("")
    elif home == "a broken cache":
        (path / ".cache" / "autopar").mkdir(parents=True)
        (path / ".cache" / "autopar" / "plans").write_text("no folder")
    monkeypatch.setenv("HOME", str(path))
    if home == "none":

        def nobody() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", nobody)
    said = answer("plan", "mlp", "--cluster", "dgx-h100:1", "--batch", 32, "--force", "dp=8,zero=0")
    assert said.status == 0, said


AUTOPAR = [sys.executable, "-m", "autopar"]


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120, **options}
    return subprocess.run([*AUTOPAR, *argv], check=False, **given)


@pytest.mark.slow
def test_outputs_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        said = run("models", stdout=full)
    assert said.returncode == 2 and said.stderr == "autopar: error: cannot write the output: No space left on device\n"
    read, write = os.pipe()
    os.close(read)
    gone = run("models", stdout=write)
    os.close(write)
    assert (gone.returncode, gone.stderr) == (0, "")
    ascii_only = run("models", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0 and not ascii_only.stderr


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.cli.commands import listing

    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "run", interrupted)
    said = answer("models")
    assert (said.status, said.err) == (130, "autopar: interrupted\n")
