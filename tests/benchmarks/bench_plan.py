"""How long `autopar plan` takes, the whole command in a fresh process: ``python tests/benchmarks/bench_plan.py [CASE ...]``.

Wall time is what a user waits for, and says little on a busy machine; processor time (user and system, all threads) is what the
command costs. `must` and `aim` are seconds of wall time on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    words: str
    must_seconds: float
    aim_seconds: float


CASES = {
    "llama3-8b": Case("llama3-8b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16", 15.0, 5.0),
    "llama3-405b": Case("llama3-405b --cluster dgx-h100:2048 --batch 2048 --seq 8192 --dtype bf16", 40.0, 15.0),
    "gpt2": Case("gpt2 --cluster local:4", 9.0, 6.0),
}

DEEP_CASES = {
    name: Case(f"tests/benchmarks/deep_models.py:{name} --cluster dgx-h100:2 --dtype bf16", must, aim)
    for name, must, aim in (
        ("resnet152", 12.0, 8.0),
        ("resnet152_twice", 15.6, 10.4),
        ("swin_l", 15.0, 10.0),
        ("swin_l_twice", 19.5, 13.0),
        ("t5_11b", 12.0, 8.0),
        ("t5_11b_twice", 15.6, 10.4),
        ("sdxl", 30.0, 15.0),
        ("sdxl_twice", 39.0, 19.5),
        ("unet", 12.0, 8.0),
    )
}
"""Other kinds of models; with ``--deep``. Twice the depth may take 1.3 times as long."""

MUST_GAP = 0.05
MUST_BYTES = 1.5e9


def measured(case: Case) -> dict[str, float | str]:
    """One run, without the cache of plans."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "autopar", "plan", *case.words.split(), "--no-cache", "-o", str(path)]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
        document = json.loads(path.read_text())
    return {
        "wall_seconds": wall,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "gap": document["predicted"]["gap"],
        "step_seconds": document["predicted"]["step_seconds"],
        "status": document["search"]["status"],
        "candidates": document["search"]["candidates"],
    }


def main() -> None:
    """Prints a table, or with ``--json`` one document; the best of so many repetitions by processor time."""
    known = CASES | DEEP_CASES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(known))
    parser.add_argument("--deep", action="store_true", help="the deep models instead of the decoders, where no case is named")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in known]
    if unknown:
        parser.error(f"no case {unknown[0]}: write some of {', '.join(known)}")
    out = {}
    for name in arguments.cases or (DEEP_CASES if arguments.deep else CASES):
        runs = [measured(known[name]) for _ in range(arguments.repeat)]
        out[name] = best = min(runs, key=lambda run: float(run["processor_seconds"]))
        if not arguments.json:
            case = known[name]
            print(
                f"{name:16} wall {best['wall_seconds']:6.1f} s (must {case.must_seconds:g}, aim {case.aim_seconds:g})  "
                f"processor {best['processor_seconds']:6.1f} s  peak {float(best['peak_bytes']) / 1e9:.2f} GB "
                f"(must {MUST_BYTES / 1e9:g})  gap {100 * float(best['gap']):.2f} % (must {100 * MUST_GAP:g})  "
                f"{best['candidates']} candidates, {best['status']}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"load": os.getloadavg()[0], "cases": out}))


if __name__ == "__main__":
    main()
