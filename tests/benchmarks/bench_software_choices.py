"""Right choices: for every group of published runs of which only the knobs differ, the configuration that is chosen without
looking at them, beside the fastest that was published, both by their price. ``python
tests/benchmarks/bench_software_choices.py``: takes minutes. Regret inside sweeps, left one source out, is said by ``autopar
validate --leave-one-source-out``."""

from __future__ import annotations

from statistics import median

from autopar.errors import AutoparError
from autopar.software.pricer import Pricer
from autopar.software.search import MANY, rank
from autopar.software.space import recipe_space
from autopar.validate.price import Session
from autopar.validate.published import comparable_runs, recipe_of, workload_of
from autopar.validate.rows import bundled_table, read_table


def main() -> None:
    session, ratios = Session(), []
    for group in comparable_runs(read_table(bundled_table())):
        priced = [each for each in session.price(group) if each.evaluation is not None]
        best = min(priced, key=lambda each: each.row.step_seconds or 0.0, default=None)
        if best is None or best.evaluation is None:
            continue
        try:
            work = workload_of(best.row)
            chosen = rank(Pricer(work), recipe_space(recipe_of(best.row)).configurations(work), MANY).best
        except AutoparError as error:
            print(best.row.id, "not priced:", error, flush=True)
            continue
        if chosen is None:
            print(best.row.id, "has no configuration", flush=True)
            continue
        ratio = best.evaluation.step_seconds / chosen.evaluation.step_seconds
        ratios.append(ratio)
        print(f"{best.row.id} {ratio:.3f} fits={chosen.fits} {chosen.configuration.describe(work)}", flush=True)
    slower, near = sum(ratio < 0.999 for ratio in ratios), sum(0.999 <= ratio <= 1.05 for ratio in ratios)
    print(f"{len(ratios)} groups, median ratio {median(ratios):.3f}")
    print(f"the chosen one is slower than the published best in {slower}, the published best is within 5 % of it in {near}")


if __name__ == "__main__":
    main()
