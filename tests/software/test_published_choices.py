"""Right choices: for groups of published runs of which only the knobs differ, the configuration that is chosen without looking at
them, beside the fastest that was published, both by their price. Regret inside sweeps by measured time, left one source out, is
said by ``autopar validate --leave-one-source-out``."""

from __future__ import annotations

import pytest
from support.oracles.published_rows import session, table

from autopar.software.pricer import Pricer
from autopar.software.search import MANY, rank
from autopar.software.space import recipe_space
from autopar.validate.published import comparable_runs, recipe_of, workload_of

EACH = 4
"""Of all groups, each so many-th: all of them take ten minutes."""
NEARLY = 0.97
"""Of some runs the share of recomputed layers is computed from their HFU, which the space does not have."""


@pytest.mark.slow
def test_no_published_configuration_is_priced_below_the_chosen_one() -> None:
    ratios, too_large = [], []
    for group in comparable_runs(table().values())[::EACH]:
        priced = [each for each in session().price(group) if each.evaluation is not None]
        best = min(priced, key=lambda each: each.row.step_seconds or 0.0, default=None)
        if best is None or best.evaluation is None:
            continue
        if not best.evaluation.fits:  # a few per cent too large by the price: what is chosen has to fit
            too_large.append(best.row.id)
            continue
        work = workload_of(best.row)
        chosen = rank(Pricer(work), recipe_space(recipe_of(best.row)).configurations(work), MANY).best
        assert chosen is not None and chosen.fits, best.row.id
        ratios.append((best.evaluation.step_seconds / chosen.evaluation.step_seconds, best.row.id))
    within = sum(ratio <= 1.05 for ratio, _ in ratios) / len(ratios)
    print(f"{len(ratios)} groups, of {within:.0%} the published best is within 5 % of the chosen one; least {min(ratios)}")
    print(f"said not to fit: {too_large}")
    assert min(ratios)[0] >= NEARLY
    if within < 0.9:
        pytest.xfail(f"the aim is that of 90 % of groups the published best is within 5 % of the chosen one: {within:.0%}")
