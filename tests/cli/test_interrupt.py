"""Ctrl-C in a terminal: the best plan so far is written. And the end of a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ctrl_c_writes_the_best_plan_so_far(tmp_path: Path) -> None:
    """The interrupt comes with the first plan that is reported, long before the search of this grid ends."""
    path = tmp_path / "plan.json"
    words = ["plan", "llama3-8b", "--cluster", "dgx-h100:8", "--batch", "128", "--seq", "8192", "--dtype", "bf16", "--no-cache"]
    process = subprocess.Popen(
        [sys.executable, "-m", "autopar", *words, "-o", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs inherit that it is ignored
    )  # fmt: skip
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "best" in line:
            process.send_signal(signal.SIGINT)
            break
    out, rest = process.communicate(timeout=120)
    said = "".join(lines) + rest
    assert process.returncode == 0, said
    assert "interrupted: the best plan so far" in said
    document = json.loads(path.read_text())
    assert document["search"]["status"] == "FEASIBLE"
    assert document["predicted"]["lower_bound_seconds"] <= document["predicted"]["step_seconds"]


def test_the_end_of_a_command_looks_through_no_objects() -> None:
    """A plan leaves a million of them: two seconds of a last garbage collection."""
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))\nimport autopar.cli as a; a.main(['models'])"
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True, timeout=120)
    assert int(process.stdout.splitlines()[-1]) > 1000
