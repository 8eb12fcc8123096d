"""Plans of bench_choice: the chosen one and the forced ones of each model, kept as files in a folder with what was measured of
them, so that measuring (on an idle machine) and predicting (at any time, also again with newer constants) are apart."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORCES = (
    *("dp=4,zero=0", "dp=4,zero=3", "tp=4", "dp=2,tp=2,zero=0", "dp=2,tp=2,zero=3"),
    *("pp=2,dp=2,zero=0", "pp=4", "pp=2,tp=2", "ep=4", "dp=2,ep=2"),
)
DATA_PARALLEL = FORCES[0]
APART = 1.05
PARTS = ("compute", "exposed", "stall", "bubble", "optimizer")


@dataclass(slots=True)
class Measured:
    """A plan: the forces that gave it, predicted and measured seconds (0: not measured), and the processor seconds of its ranks
    over the cores: of the step, and of the update in it. `parts` is what the prediction adds up to."""

    names: list[str]
    what: str
    predicted: float
    seconds: float = 0.0
    own: tuple[float, float] = (0.0, 0.0)
    parts: str = ""

    @property
    def ratio(self) -> float:
        return self.predicted / self.seconds

    @property
    def own_ratio(self) -> float:
        return self.predicted / self.own[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one place: regret, order, predicted over measured of each plan (the chosen one first), and data
    parallelism over chosen; of the clock where `by_clock`, else of processor time."""

    name: str
    found: tuple[Measured, ...]
    by_clock: bool

    def seconds(self, each: Measured) -> float:
        return each.seconds if self.by_clock else each.own[0]

    @property
    def regret(self) -> float:
        return self.seconds(self.found[0]) / min(map(self.seconds, self.found)) - 1

    @property
    def order(self) -> float:
        """Concordant less discordant pairs, over all pairs that are apart."""
        signs = [
            1 if (a.predicted < b.predicted) == (self.seconds(a) < self.seconds(b)) else -1
            for a, b in itertools.combinations(self.found, 2)
            if max(self.seconds(a), self.seconds(b)) > APART * min(self.seconds(a), self.seconds(b))
        ]
        return sum(signs) / len(signs) if signs else 1.0

    @property
    def ratios(self) -> list[float]:
        return [each.predicted / self.seconds(each) for each in self.found]

    @property
    def gain(self) -> float:
        data = next((self.seconds(each) for each in self.found if DATA_PARALLEL in each.names), math.nan)
        return data / self.seconds(self.found[0])


def make_plans(name: str, cluster: Any, folder: Path, most: int) -> None:
    """Writes the chosen plan (plan0) and the first forced ones that are others, at most `most` in all, and the forces of each;
    nothing where the folder has them."""
    from choice_models import build

    import autopar

    if (folder / "names.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, list[str]] = {}
    for force in ("", *FORCES):
        model, batch = build(name)
        try:
            plan = autopar.plan(model, cluster, batch, force=force, time_limit_seconds=10)
        except autopar.AutoparError as error:
            print(f"  {force:18} no plan: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        text = repr(plan.candidate)
        if text not in names and len(names) < most:
            (folder / f"plan{len(names)}.json").write_text(plan.to_json())
            names[text] = []
        if text in names:
            names[text].append(force or "chosen")
    (folder / "names.json").write_text(json.dumps(list(names.values())))


def predictions(folder: Path, cluster: Any) -> list[Measured]:
    """The plans of a folder as the evaluator prices them on `cluster` today, with what was measured, if it was."""
    from autopar.cost_models.calibrate.measure import available_cores
    from autopar.cost_models.step.evaluate import evaluate
    from autopar.ir.plan_file.plan_file import load_plan

    out = []
    times = json.loads((folder / "times.json").read_text()) if (folder / "times.json").exists() else None
    for index, names in enumerate(json.loads((folder / "names.json").read_text())):
        plan = load_plan(folder / f"plan{index}.json")
        told = evaluate(plan.graph, plan.candidate, cluster)
        parts = ", ".join(f"{part} {1e3 * getattr(told, f'{part}_seconds'):.1f}" for part in PARTS)
        made = Measured(names, plan.describe(), told.step_seconds, parts=parts)
        if times is not None:
            step, update = min(times["own"][f"plan{index}"])
            made.seconds = min(times["clock"][f"plan{index}"])
            made.own = step / available_cores(), update / available_cores()
        out.append(made)
    return out


def print_plans(found: Sequence[Measured]) -> None:
    """A line for each plan, the fastest first."""
    for each in sorted(found, key=lambda each: each.seconds):
        took = f"{1e3 * each.seconds:7.1f} ms, of cores {1e3 * each.own[0]:7.1f} ({1e3 * each.own[1]:5.1f})"
        told = f"predicted {1e3 * each.predicted:7.1f}: {each.ratio:5.2f} of the clock, {each.own_ratio:5.2f} of the cores"
        print(f"  {took}, {told}  {', '.join(each.names)} ({each.what}; {each.parts})", flush=True)


def print_table(place: str, rows: Sequence[Row], missing: Sequence[str]) -> None:
    """One line for each model, and all of them together."""
    if missing:
        print(f"{place}: not measured in the time: {', '.join(missing)}")
    if not rows:
        return
    by = "the clock" if rows[0].by_clock else "processor time over the cores"
    columns = f"{'model':16} plans  regret   order  data parallelism  predicted over measured (least, median, most, chosen)"
    print(f"{place}, by {by}:\n  {columns}")
    for row in rows:
        ratios = row.ratios
        told = f"{min(ratios):.2f} {statistics.median(ratios):.2f} {max(ratios):.2f} {ratios[0]:.2f}"
        start = f"{row.name:16} {len(ratios):5} {100 * row.regret:6.1f} % {row.order:6.2f}"
        print(f"  {start} {row.gain:11.2f} times  {told}")
    every = [ratio for row in rows for ratio in row.ratios]
    within = sum(0.8 <= ratio <= 1.2 for ratio in every)
    regrets, order = [row.regret for row in rows], statistics.mean(row.order for row in rows)
    print(f"{place}: regret mean {100 * statistics.mean(regrets):.1f} %, largest {100 * max(regrets):.1f} %; order {order:.2f};")
    print(f"  predicted over measured 0.8 to 1.2 in {within} of {len(every)} plans, in the median {statistics.median(every):.2f}")
