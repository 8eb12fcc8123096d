"""``python -m support.fuzzing.models --seed 7 --show``, or ``--first 0 --count 2000`` for many; run it in tests/."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from support.fuzzing.models.compare import run_trials
from support.fuzzing.models.many import is_said_well, many_trials
from support.fuzzing.models.trial import Trial, prepare
from support.harness.home import ranks_in_a_home
from support.harness.rank_pool import RankPool


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, help="one trial")
    parser.add_argument("--world", type=int, default=0, help="on 2 or 4 ranks, whatever the seed draws")
    parser.add_argument("--force", help="under this plan, whatever the seed draws")
    parser.add_argument("--show", action="store_true", help="print the model, and with --program the program")
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ranks_in_a_home() as ranks:
        return _one(options, ranks, os.environ["HOME"]) if options.seed is not None else _many(options, ranks)


def _one(options: argparse.Namespace, ranks: RankPool, folder: str) -> int:
    trial: Trial = prepare(options.seed, folder, options.world, options.force)
    if options.show and trial.written is not None:
        print(trial.written.text, {name: tuple(x.shape) for name, x in trial.written.inputs.items()}, sep="\n")
        print("training" if trial.written.training else "evaluation")
    if options.program and trial.case is not None:
        print(trial.case.text)
    run_trials([trial], ranks)
    what = trial.wrong or (f"refused: {trial.refused}" if trial.refused else "unsteady" if trial.unsteady else "equal")
    print(f"{trial.headline} ({trial.stage}): {what}")
    return int(bool(trial.wrong) or not is_said_well(trial.refused) if trial.refused else bool(trial.wrong))


def _many(options: argparse.Namespace, ranks: RankPool) -> int:
    tally = many_trials(range(options.first, options.first + options.count), ranks, say=lambda line: print(line, flush=True))
    kinds = Counter(f"{trial.stage}: {trial.refused[:110]}" for trial in tally.refusals)
    for text, count in kinds.most_common(60):
        print(f"{count:5d} {text}")
    print(
        f"{tally.equal} equal, {tally.refused} refused, {tally.unsteady} unsteady, {len(tally.wrong)} wrong, "
        f"{len(tally.badly_said)} badly said; {time.process_time():.0f} s here, {_seconds_of(ranks):.0f} s on ranks"
    )
    return int(bool(tally.wrong or tally.badly_said))


def _seconds_of(ranks: RankPool) -> float:
    """Processor seconds of the ranks that live."""
    ticks = 0
    for processes in ranks.sets.values():
        for process in processes.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
