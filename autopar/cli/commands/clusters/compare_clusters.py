"""``autopar compare-clusters``: time and money of a training run on several clusters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.commands.fit import captured
from autopar.cli.console import Console

if TYPE_CHECKING:
    from autopar.software.spending import Spending


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print a row for each cluster and software, the cheapest first. Infeasible where the model fits on none of them."""
    from autopar.errors import Infeasible
    from autopar.software.known.registry import known_software, software_named
    from autopar.software.models import model_of
    from autopar.software.spending import measurement, offer_of, spending_of

    names = list(filter(None, arguments.software.split(",")))
    software = [software_named(name) for name in names] or list(known_software().values())
    offers = [offer_of(text) for text in arguments.clusters]
    model = model_of(arguments.model, arguments.seq or 0, captured(console))
    found: list[Spending] = []
    for offer in offers:
        console.progress(f"pricing {offer.name}")
        priced = spending_of(model, offer, software, arguments.tokens, arguments.batch, arguments.dtype)
        if not priced:
            console.progress(f"{offer.name}: {model.name} does not fit with {', '.join(each.name for each in software)}")
        found += priced
    if not found:
        clusters = ", ".join(each.name for each in offers)
        text = f"{model.name} at batch {arguments.batch} fits on none of {clusters}"
        raise Infeasible(f"{text}: name a larger one, or a smaller batch")
    found.sort(key=lambda each: each.cost)
    rows = [
        (
            each.offer.name, each.choice.software.name, _days(each.hours), " to ".join(map(_days, each.hours_interval)),
            f"{each.cost:,.0f}", "{:,.0f} to {:,.0f}".format(*each.cost_interval), f"{each.tokens_per_second:,.0f}",
            f"{each.tokens_per_money:,.0f}",
        )
        for each in found
    ]  # fmt: skip
    header = ("cluster", "software", "days", "", "cost", "", "tokens/s", "tokens for 1")
    console.table(f"{arguments.tokens:.3g} tokens of {model.name}, batch {arguments.batch} x {model.seq}", header, rows)
    said = measurement(found)
    console.text(
        f"to know it better, measure {said}" if said else "no other cluster comes near the cheapest, as published runs err"
    )
    console.document({"runs": [_document(each) for each in found], "measure": said})
    return 0


def _days(hours: float) -> str:
    return f"{hours / 24:.3g}"


def _document(each: Spending) -> dict[str, Any]:
    best = each.choice.ranking.best
    assert best is not None
    return {
        "cluster": each.offer.name,
        "software": each.choice.software.name,
        "price_per_device_hour": each.offer.price,
        "hours": each.hours,
        "hours_interval": list(each.hours_interval),
        "cost": each.cost,
        "cost_interval": list(each.cost_interval),
        "tokens_per_second": each.tokens_per_second,
        "tokens_per_money": each.tokens_per_money,
        "configuration": best.configuration.describe(each.choice.work),
        "step_seconds": best.evaluation.step_seconds,
    }
