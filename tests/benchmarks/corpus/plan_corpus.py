"""A corpus of 60 plans, kept before a change of the search and compared after it.

``python tests/benchmarks/corpus/plan_corpus.py plan FOLDER [--only PART] [--root CHECKOUT]`` writes one plan a case, and its
seconds; ``... compare BEFORE AFTER`` prints the ratio of predicted steps, both gaps and the processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DEEP = "tests/benchmarks/deep_models.py"

CASES = {
    "8b-64": "llama3-8b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16",
    "405b-16384": "llama3-405b --cluster dgx-h100:2048 --batch 2048 --seq 8192 --dtype bf16",
    "mixtral-256": "mixtral-8x22b --cluster dgx-h100:32 --batch 256 --seq 4096 --dtype bf16",
    "deepseek-256": "deepseek-v3 --cluster dgx-h100:32 --batch 512 --seq 4096 --dtype bf16",
    "deepseek-256-large": "deepseek-v3 --cluster dgx-h100:32 --batch 1024 --seq 4096 --dtype bf16",
    "70b-64": "llama3-70b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16",
    "70b-256": "llama3-70b --cluster dgx-h100:32 --batch 512 --seq 8192 --dtype bf16",
    "70b-8-b200": "llama3-70b --cluster dgx-b200:1 --batch 16 --seq 4096 --dtype bf16",
    "405b-1024": "llama3-405b --cluster dgx-h100:128 --batch 512 --seq 8192 --dtype bf16",
    "405b-576-gb200": "llama3-405b --cluster gb200-nvl72:144 --batch 576 --seq 8192 --dtype bf16",
    "405b-128": "llama3-405b --cluster dgx-h100:16 --batch 128 --seq 4096 --dtype bf16",
    "8b-1": "llama3-8b --cluster dgx-h100:1 --force dp=1 --batch 8 --seq 2048 --dtype bf16",
    "8b-8": "llama3-8b --cluster dgx-h100:1 --batch 16 --seq 4096 --dtype bf16",
    "8b-8-v100": "llama3-8b --cluster dgx-v100:1 --batch 16 --seq 2048 --dtype fp16",
    "8b-16-a100-40": "llama3-8b --cluster dgx-a100-40:2 --batch 32 --seq 4096 --dtype bf16",
    "8b-512": "llama3-8b --cluster dgx-h100:64 --batch 1024 --seq 8192 --dtype bf16",
    "8b-8-long": "llama3-8b --cluster dgx-h100:1 --batch 8 --seq 32768 --dtype bf16",
    "8b-64-longer": "llama3-8b --cluster dgx-h100:8 --batch 8 --seq 131072 --dtype bf16",
    "8b-mixed": "llama3-8b --cluster dgx-h100:2+dgx-a100:2 --batch 64 --seq 4096 --dtype bf16",
    "8b-fp8": "llama3-8b --cluster dgx-h100:2 --batch 64 --seq 4096 --dtype fp8",
    "8b-sgd": "llama3-8b --cluster dgx-h100:1 --batch 16 --seq 4096 --dtype bf16 --optimizer sgd",
    "8b-muon": "llama3-8b --cluster dgx-h100:2 --batch 32 --seq 4096 --dtype bf16 --optimizer muon",
    "8b-tp8": "llama3-8b --cluster dgx-h100:2 --batch 32 --seq 4096 --dtype bf16 --force tp=8",
    "8b-pp2": "llama3-8b --cluster dgx-h100:2 --batch 32 --seq 4096 --dtype bf16 --force pp=2",
    "8b-pp4tp2": "llama3-8b --cluster dgx-h100:2 --batch 32 --seq 4096 --dtype bf16 --force pp=4,tp=2",
    "8b-pp2zbv": "llama3-8b --cluster dgx-h100:1 --batch 32 --seq 2048 --dtype bf16 --force pp=2,schedule=zbv",
    "8b-dp8zero3": "llama3-8b --cluster dgx-h100:1 --batch 16 --seq 4096 --dtype bf16 --force dp=8,zero=3",
    "8b-mi300x": "llama3-8b --cluster mi300x:2 --batch 64 --seq 4096 --dtype bf16",
    "70b-tp8pp2": "llama3-70b --cluster dgx-h100:8 --batch 128 --seq 4096 --dtype bf16 --force tp=8,pp=2",
    "70b-fixed": "llama3-70b --cluster dgx-h100:8 --batch 128 --seq 4096 --dtype bf16 "
    "--force tp=8,pp=2,zero=1,micro_batches=16,recompute=none,zero_group=0,sequence_parallel=1",
    "mixtral-64": "mixtral-8x22b --cluster dgx-h100:8 --batch 128 --seq 4096 --dtype bf16",
    "mixtral-64-ep8": "mixtral-8x22b --cluster dgx-h100:8 --batch 128 --seq 4096 --dtype bf16 --force ep=8",
    "mixtral-load": "mixtral-8x22b --cluster dgx-h100:16 --batch 128 --seq 4096 --dtype bf16 --expert-load 1.3",
    "deepseek-2048": "deepseek-v3 --cluster dgx-h100:256 --batch 4096 --seq 4096 --dtype bf16",
    "qwen3-8": "qwen3-8b --cluster dgx-a100:1 --batch 16 --seq 4096 --dtype bf16",
    "qwen3-128": "qwen3-8b --cluster dgx-a100:16 --batch 256 --seq 4096 --dtype bf16",
    "gpt2-4": "gpt2 --cluster local:4",
    "gpt2-8": "gpt2 --cluster dgx-a100:1 --batch 64 --dtype bf16",
    "gpt2-xl-16": "gpt2-xl --cluster dgx-v100:2 --batch 64 --dtype fp16",
    "gpt2-xl-pp4": "gpt2-xl --cluster dgx-a100:2 --batch 64 --dtype bf16 --force pp=4,dp=4",
    "bert-16": "bert-large --cluster dgx-a100:2 --batch 512 --seq 512 --dtype bf16",
    "vit-32": "vit-huge --cluster dgx-a100:4 --batch 1024 --dtype bf16",
    "mlp-4": "mlp --cluster local:4",
    "convnet-4": "convnet --cluster local:4",
    "gpt2-tiny-1": "gpt2-tiny --cluster local:1",
    "gpt2-tiny-4": "gpt2-tiny --cluster local:4",
    "gpt2-tiny-pp2": "gpt2-tiny --cluster local:4 --force pp=2,dp=2",
    "llama-tiny-8": "llama-tiny --cluster local:8",
    "llama-tiny-tp2": "llama-tiny --cluster local:4 --force tp=2,dp=2",
    "mixtral-tiny-4": "mixtral-tiny --cluster local:4",
    "mixtral-tiny-ep2": "mixtral-tiny --cluster local:4 --force ep=2",
    "qwen3-tiny-4": "qwen3-tiny --cluster local:4 --force pp=4",
    "bert-tiny-4": "bert-tiny --cluster local:4 --force zero=2",
    "vit-tiny-4": "vit-tiny --cluster local:4 --force tp=4",
    "resnet152": f"{DEEP}:resnet152 --cluster dgx-h100:2 --dtype bf16",
    "swin": f"{DEEP}:swin_l --cluster dgx-h100:2 --dtype bf16",
    "t5-11b": f"{DEEP}:t5_11b --cluster dgx-h100:2 --dtype bf16",
    "t5-11b-tp4": f"{DEEP}:t5_11b --cluster dgx-h100:2 --dtype bf16 --force tp=4",
    "sdxl": f"{DEEP}:sdxl --cluster dgx-h100:2 --dtype bf16",
    "unet": f"{DEEP}:unet --cluster dgx-h100:2 --dtype bf16",
}


def plan(folder: Path, root: Path, only: str) -> None:
    """Write the plan of each case whose name contains `only` and is not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for name, words in CASES.items():
        path, facts = folder / f"{name}.plan.json", folder / f"{name}.took.json"
        if only not in name or facts.exists():
            continue
        command = [sys.executable, "-m", "autopar", "plan", *words.split(), "--no-cache", "-o", str(path)]
        began = time.monotonic()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=root, env=environment, text=True, **quiet)  # type: ignore[call-overload]
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        took = {"wall": time.monotonic() - began, "processor": used.ru_utime + used.ru_stime, "status": code}
        if code:
            took["error"] = errors.strip().splitlines()[-1] if errors.strip() else ""
        facts.write_text(json.dumps(took))
        print(name, took, flush=True)


def compare(before: Path, after: Path) -> None:
    """Print a row a case that both folders have: the ratio of predicted steps, gaps and processor seconds."""
    print(f"{'case':22} {'before s':>10} {'after s':>10} {'ratio':>7} {'gap':>7} {'gap':>7} {'cpu s':>7} {'cpu s':>7}")
    for name in CASES:
        took = [_read(folder / f"{name}.took.json") for folder in (before, after)]
        plans = [_read(folder / f"{name}.plan.json") for folder in (before, after)]
        if not all(took):
            continue
        if not all(plans):
            print(f"{name:22} {[each.get('error', 'planned') for each in took]}")
            continue
        first, second = (each["predicted"] for each in plans)
        seconds = " ".join(f"{each['processor']:7.1f}" for each in took)
        print(
            f"{name:22} {first['step_seconds']:10.5g} {second['step_seconds']:10.5g} "
            f"{second['step_seconds'] / first['step_seconds']:7.4f} {first['gap']:7.4f} {second['gap']:7.4f} {seconds} "
            f"{'same mesh' if plans[0]['mesh'] == plans[1]['mesh'] else 'another mesh'}"
        )


def _read(path: Path) -> dict[str, Any]:
    """Return the document of a file; empty where there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main() -> None:
    """Plan the corpus, or compare two runs of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--root", type=Path, default=ROOT)
    asked = parser.parse_args()
    if asked.what == "plan":
        plan(asked.folders[0].absolute(), asked.root.absolute(), asked.only)
    else:
        compare(*asked.folders)


if __name__ == "__main__":
    main()
