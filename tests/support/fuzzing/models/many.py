"""Many trials, what came of them, and whether what was refused is said well."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from support.fuzzing.models.compare import run_trials
from support.fuzzing.models.trial import Trial, prepare
from support.harness.rank_pool import RankPool

PLACE = re.compile(r"\.py:\d+|\b(input|output|module|parameter|buffer|block|stage|batch|force|Layer\d+|Model)\b")
REMEDY = re.compile(
    r"\b(pass|use|write|give|return|make|leave|plan|take|lower|choose|call|keep|move|drop|force|add|wrap|register|ask|let|raise|"
    r"set|launch|change|put|mark|load|go|select|try)\b"
)


def is_said_well(refusal: str) -> bool:
    """Whether a refusal is one line that says where, and how to mend it."""
    line, *more = refusal.splitlines()
    return (not more or line.startswith("Infeasible")) and bool(PLACE.search(refusal)) and bool(REMEDY.search(refusal))


@dataclass(slots=True)
class Tally:
    """What came of many trials."""

    equal: int = 0
    unsteady: int = 0
    wrong: list[Trial] = field(default_factory=list)
    badly_said: list[Trial] = field(default_factory=list)
    refusals: list[Trial] = field(default_factory=list)

    @property
    def refused(self) -> int:
        return len(self.refusals)

    @property
    def failures(self) -> str:
        """Each failure with what makes it again."""
        return "\n\n".join(
            f"{trial.headline} ({trial.stage}): {trial.wrong or trial.refused}\n"
            f"  again: python -m support.fuzzing.models --seed {trial.seed} --world {trial.world} --show   (in tests/)"
            for trial in (*self.wrong, *self.badly_said)
        )


def many_trials(
    seeds: Iterable[int], ranks: RankPool, world: int = 0, together: int = 25, say: Callable[[str], None] = lambda line: None
) -> Tally:
    """Trials of all seeds, `together` of them at once on the ranks (`world` of them, or what each seed draws)."""
    tally, waiting = Tally(), list[Trial]()

    def finish() -> None:
        run_trials(waiting, ranks)
        for trial in waiting:
            if trial.wrong:
                tally.wrong.append(trial)
                say(f"WRONG {trial.headline} ({trial.stage}): {trial.wrong.strip().splitlines()[-1][:300]}")
            elif trial.refused:
                tally.refusals.append(trial)
                if not is_said_well(trial.refused):
                    tally.badly_said.append(trial)
                    say(f"BADLY SAID {trial.headline} ({trial.stage}): {trial.refused[:300]}")
            elif trial.unsteady:
                tally.unsteady += 1
            else:
                tally.equal += 1
            trial.model = trial.expected = trial.case = None
        waiting.clear()

    gc.disable()  # captures make many objects, and a collection of all costs more than a capture
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed in seeds:
                waiting.append(prepare(seed, folder, world))
                if len(waiting) == together:
                    finish()
                    gc.collect()
            finish()
    finally:
        gc.enable()
    return tally
