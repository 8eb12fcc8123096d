"""Scripts of habits on four ranks beside one process: right, or refused in one line."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.fuzzing.habits.script import Ended, Script, batches, net, run_script, write_script
from support.harness.comparison import different_numbers, different_tensors
from support.harness.rank_pool import RankError, RankPool

TOLERANCE = 1e-9


@dataclass(slots=True)
class Tally:
    """What came of many scripts; `failures` has each that is wrong, with what makes it again."""

    equal: int = 0
    refusals: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@cache
def plan_text(kind: str, force: str) -> str:
    import autopar

    return autopar.plan(net(kind), "local:4", batches()[0], force=force).to_json()


def on_rank(script: Script, plan: str) -> Ended:
    """The script as a rank runs it."""
    import autopar

    return run_script(script, lambda model: autopar.parallelize(model, "local:4", batches()[0], plan=plan))


def try_script(script: Script, ranks: RankPool, timeout: float = 120.0) -> tuple[str, str]:
    """What is wrong, and what was refused."""
    expected = run_script(script)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text(plan_text(script.kind, script.force))
        try:
            found = ranks.run(on_rank, script, str(path), timeout=timeout)
        except RankError as error:
            return f"a rank failed or hung: {str(error).strip().splitlines()[-1]}", ""
    for rank, ended in enumerate(found):
        if wrong := _differences(script, ended, expected):
            return f"rank {rank}: {wrong}", ""
    return "", next((ended.error for ended in found if ended.refused), "")


def _differences(script: Script, found: Ended, expected: Ended) -> str:
    """What differs from one process. A script that one process cannot run either ends there."""
    both = min(len(found.notes), len(expected.notes))
    if wrong := different_numbers("number", found.notes[:both], expected.notes[:both], TOLERANCE):
        return wrong[0]
    if found.error and not (expected.error and expected.at <= found.at):
        line = f"{script.statements[found.at]}: {found.error}"
        return "" if found.refused and "\n" not in found.error.strip() else line
    if expected.error and not found.error:
        return f"one process raises at {script.statements[expected.at]}: {expected.error}"
    wrong = different_tensors("state", found.state, expected.state, TOLERANCE, smallest=1e-9) if not found.error else []
    return wrong[0] if wrong else ""


def try_many(seeds: Iterable[int], ranks: RankPool, say: Callable[[str], Any] = lambda line: None) -> Tally:
    tally = Tally()
    for seed in seeds:
        script = write_script(seed)
        wrong, refused = try_script(script, ranks)
        if wrong:
            again = f"again: python -m support.fuzzing.habits --seed {seed} --show   (in tests/)"
            tally.failures.append(f"seed {seed}: {wrong}\n  {again}")
            say(f"WRONG seed {seed}: {wrong[:300]}")
        elif refused:
            tally.refusals.append(refused)
        else:
            tally.equal += 1
    return tally
