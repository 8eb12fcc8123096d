"""Right choices: for groups of published runs of which only the knobs differ, the configuration that is chosen without looking at
them, beside the fastest that was published, both by their price. Regret inside sweeps by measured time, left one source out, is
said by ``autopar validate --leave-one-source-out``."""

from __future__ import annotations

from collections import Counter

import pytest
from support.oracles.published_rows import session, table
from support.published_runs import comparable_runs, recipe_of, workload_of

from autopar.errors import AutoparError
from autopar.software.choose import MANY, rank
from autopar.software.configuration import Configuration
from autopar.software.pricer import Pricer
from autopar.software.space import recipe_space
from autopar.validate.configuration import configuration_of
from autopar.validate.rows import Row

EACH = 4
"""Of all groups, each so many-th: all of them take ten minutes."""
NEARLY = 0.97
"""Of some runs the share of recomputed layers is computed from their HFU, which the space does not have."""


KNOBS = ("tensor", "context", "experts", "stages", "virtual", "zero", "group", "recompute", "micro")


def settings_of(publication: tuple[str, str]) -> dict[str, object]:
    """The knobs that a publication never turns, with their values: it states them as settings."""
    values: dict[str, set[object]] = {name: set() for name in KNOBS}
    for row in table().values():
        if publication_of(row) == publication:
            try:
                own = configuration_of(row)
            except AutoparError:
                continue
            for name in KNOBS:
                values[name].add(setting(own, name))
    return {name: one for name, (one, *others) in values.items() if not others}


def publication_of(row: Row) -> tuple[str, str]:
    """The document of a run, without commit and place in it, and the software."""
    repository, _, place = row.source.partition("@")
    return repository + place.partition(":")[2].split(" ")[0], row.software_stack


def setting(configuration: Configuration, name: str) -> object:
    """A knob; of a group of shards, whether there is one."""
    value = getattr(configuration, name)
    return bool(value) if name == "group" else value


@pytest.mark.slow
def test_no_published_configuration_is_priced_below_the_chosen_one() -> None:
    """The chosen one fits by what its allocator would reserve, among all configurations of the recipe, and among those with the
    settings of the publication. Groups whose published best is above that by its price, or that have no choice, are counted."""
    every: list[tuple[float, str]] = []
    as_set: list[tuple[float, str]] = []
    above, knobs = [], Counter[str]()
    for group in comparable_runs(table().values())[::EACH]:
        priced = [each for each in session().price(group) if each.evaluation is not None]
        best = min(priced, key=lambda each: each.row.step_seconds or 0.0, default=None)
        if best is None or best.evaluation is None:
            continue
        if not best.evaluation.fits:
            above.append(best.row.id)
            continue
        work, settings = workload_of(best.row), settings_of(publication_of(best.row))
        pricer, space = Pricer(work, margin=True), list(recipe_space(recipe_of(best.row)).configurations(work))
        alike = [each for each in space if all(setting(each, name) == value for name, value in settings.items())]
        for found, configurations in ((every, space), (as_set, alike)):
            if len(configurations) < 2:
                continue
            chosen = rank(pricer, configurations, MANY).best
            assert chosen is not None and chosen.fits, best.row.id
            found.append((best.evaluation.step_seconds / chosen.evaluation.step_seconds, best.row.id))
            if found is as_set and found[-1][0] > 1.05:
                own = configuration_of(best.row)
                knobs.update(name for name in KNOBS if getattr(own, name) != getattr(chosen.configuration, name))
    within = []
    for words, found in (("", every), (" with the settings of the publication", as_set)):
        within.append(sum(ratio <= 1.05 for ratio, _ in found) / len(found))
        print(f"{len(found)} groups{words}: of {within[-1]:.0%} the published best is within 5 %; least {min(found)}")
    print(f"in the others these knobs differ: {knobs.most_common()}; above the memory by its price: {above}")
    assert min(every + as_set)[0] >= NEARLY
    if max(within) < 0.9:
        pytest.xfail(f"the aim is that of 90 % of groups the published best is within 5 % of the chosen one: {within}")
