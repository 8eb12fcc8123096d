"""Sixty plans to hold one checkout against another, so that a change of the search is seen in all kinds of them:

    python tests/benchmarks/plan_corpus.py run before.json --root ../another-checkout
    python tests/benchmarks/plan_corpus.py run after.json
    python tests/benchmarks/plan_corpus.py compare before.json after.json

A run goes on where it was stopped. Steps and gaps do not depend on the machine, seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench_plan import DEEP_CASES, ROOT, Case, measured

MOST_SLOWER, MOST_WIDER = 1.005, 0.001
_LARGE = "--seq 8192 --dtype bf16"
_MODELS = {
    "llama3-8b": [f"dgx-h100:{nodes} --batch 128 {_LARGE}" for nodes in (1, 2, 8, 32)]
    + [f"dgx-a100:8 --batch 256 {_LARGE}", f"gb200-nvl72:2 --batch 64 {_LARGE}", "dgx-v100:4 --batch 64 --seq 2048 --dtype fp16"]
    + [f"dgx-h100:4 --batch 128 {_LARGE} --force {force}" for force in ("tp=4", "pp=4", "zero=3", "dp=4", "zero_group=8")],
    "llama3-70b": [f"dgx-h100:{nodes} --batch 256 {_LARGE}" for nodes in (4, 8, 32)]
    + [f"dgx-b200:4 --batch 128 {_LARGE}", f"mi300x:8 --batch 256 {_LARGE}"]
    + [f"dgx-h100:8 --batch 256 {_LARGE} --force {force}" for force in ("pp=4", "tp=8,pp=2", "zero=1")],
    "llama3-405b": [f"dgx-h100:{nodes} --batch {batch} {_LARGE}" for nodes, batch in ((64, 512), (2048, 2048))],
    "mixtral-8x22b": [f"dgx-h100:{nodes} --batch 256 {_LARGE}" for nodes in (8, 32)],
    "deepseek-v3": ["dgx-h100:32 --batch 512 --seq 4096 --dtype bf16"],
    "qwen3-8b": ["dgx-a100:1 --batch 32 --seq 4096 --dtype bf16", "dgx-h100:4 --batch 128 --seq 4096 --dtype fp8"],
    "gpt2": ["dgx-v100:1 --batch 64", "dgx-h100:1 --batch 256 --dtype bf16", "dgx-a100:2+dgx-h100:2 --batch 256 --dtype bf16"],
    "gpt2-xl": ["dgx-v100:1 --batch 32 --dtype fp16"]
    + ["dgx-a100:1 --batch 64 --dtype bf16", "dgx-a100-40:2 --batch 128 --dtype bf16"]
    + [f"dgx-a100:1 --batch 64 --dtype bf16 --force {force}" for force in ("pp=2", "tp=2")],
    "bert-large": ["dgx-v100:1 --batch 64", "dgx-a100:2 --batch 512 --dtype bf16", "dgx-a100:1 --batch 64 --force tp=2"],
    "vit-huge": ["dgx-v100:1 --batch 64", "dgx-h100:2 --batch 512 --dtype bf16", "dgx-h100:1 --batch 128 --force pp=2"],
    "gpt2-tiny": ["gb200-nvl72:1 --batch 8", "gb200-nvl72:1 --batch 8 --force tp=2", "gb200-nvl72:1 --batch 8 --force pp=2"],
    "llama-tiny": ["gb200-nvl72:1 --batch 8", "gb200-nvl72:2 --batch 8 --force tp=2,pp=2"],
    "mixtral-tiny": ["gb200-nvl72:1 --batch 8", "gb200-nvl72:1 --batch 8 --force ep=2"],
    "qwen3-tiny": ["gb200-nvl72:1 --batch 8"],
    "bert-tiny": ["gb200-nvl72:1 --batch 8"],
    "vit-tiny": ["gb200-nvl72:1 --batch 8"],
    "mlp": ["gb200-nvl72:1 --batch 8", "gb200-nvl72:1 --batch 8 --force tp=4"],
    "convnet": ["gb200-nvl72:1 --batch 8", "gb200-nvl72:1 --batch 8 --force tp=2"],
}  # fmt: skip
_DEEP = ("resnet152", "swin_l", "t5_11b", "sdxl", "unet")
CORPUS = tuple(f"{name} --cluster {words}" for name, many in _MODELS.items() for words in many) + tuple(
    DEEP_CASES[name].words for name in _DEEP
)


def run(file: Path, root: Path) -> None:
    """Plan what `file` has not, and write it there. A case that ends without a plan has its message."""
    done = json.loads(file.read_text()) if file.exists() else {}
    for words in CORPUS:
        if words not in done:
            try:
                done[words] = measured(Case(words, 0.0, 0.0), root)
            except SystemExit as error:
                done[words] = {"error": str(error)}
            file.write_text(json.dumps(done, indent=1))
            print(words, done[words], flush=True)


def compare(before: Path, after: Path) -> None:
    """Print each case, with an arrow where the step is slower or the gap larger, and the sums of all."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    slower, wider, both = 0, 0, []
    for words in CORPUS:
        if words not in old or words not in new or "error" in old[words] or "error" in new[words]:
            print(f"no plan in one of them: {words}")
            continue
        both.append(words)
        step, gap, seconds = (new[words][key] for key in ("step_seconds", "gap", "processor_seconds"))
        ratio, wide = step / old[words]["step_seconds"], gap - old[words]["gap"]
        slower, wider = slower + (ratio > MOST_SLOWER), wider + (wide > MOST_WIDER)
        mark = "  <-" if ratio > MOST_SLOWER or wide > MOST_WIDER else ""
        share = seconds / old[words]["processor_seconds"]
        print(f"step x {ratio:.4f}  gap {100 * gap:5.2f} % ({100 * wide:+.2f})  processor x {share:.2f}  {words}{mark}")
    before_seconds, after_seconds = (sum(each[words]["processor_seconds"] for words in both) for each in (old, new))
    print(
        f"{len(both)} plans: {slower} more than 0.5 % slower, {wider} with a larger gap; "
        f"processor {before_seconds:.0f} -> {after_seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="plan all cases that a file has not")
    one.add_argument("file", type=Path)
    one.add_argument("--root", type=Path, default=ROOT, help="the checkout that plans (default: this one)")
    two = commands.add_parser("compare", help="print what differs between two files")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.file, arguments.root.resolve())
    else:
        compare(arguments.before, arguments.after)


if __name__ == "__main__":
    main()
