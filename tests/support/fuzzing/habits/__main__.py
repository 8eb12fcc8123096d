"""``python -m support.fuzzing.habits --seed 7 --show``, or ``--first 0 --count 300`` for many; run it in tests/."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace

import torch

from support.fuzzing.habits.script import single_scripts, write_script
from support.fuzzing.habits.trial import try_many, try_script
from support.harness.home import ranks_in_a_home
from support.harness.rank_pool import RankPool


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, help="one script")
    parser.add_argument("--show", action="store_true", help="print the script")
    parser.add_argument("--force", help="under this plan, whatever the seed draws")
    parser.add_argument("--each", action="store_true", help="each statement of the grammar in a script of its own")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ranks_in_a_home() as ranks:
        if options.each:
            return _each(options.force or "dp=2,tp=2", ranks)
        return _many(options, ranks) if options.seed is None else _one(options, ranks)


def _one(options: argparse.Namespace, ranks: RankPool) -> int:
    script = write_script(options.seed)
    if options.force is not None:
        script = replace(script, force=options.force)
    if options.show:
        print(script.text, flush=True)
    wrong, refused = try_script(script, ranks)
    print(f"wrong: {wrong}" if wrong else f"refused: {refused}" if refused else "equal")
    return int(bool(wrong))


def _each(force: str, ranks: RankPool) -> int:
    count = 0
    for script in single_scripts(force):
        wrong, refused = try_script(script, ranks)
        count += bool(wrong)
        answer = "WRONG" if wrong else "refused" if refused else "right"
        print(f"{answer}: {script.statements[1]}  {wrong or refused}", flush=True)
    print(f"{count} wrong")
    return int(bool(count))


def _many(options: argparse.Namespace, ranks: RankPool) -> int:
    tally = try_many(range(options.first, options.first + options.count), ranks, lambda line: print(line, flush=True))
    for text, count in Counter(line[:150] for line in tally.refusals).most_common():
        print(f"{count:5d} {text}")
    print(f"{tally.equal} equal, {len(tally.refusals)} refused, {len(tally.failures)} wrong")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
