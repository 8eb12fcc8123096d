"""``autopar explain``: why this plan, what it costs where, and what another one would cost. Needs the file only."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from autopar.cli.baselines import baseline_table
from autopar.cli.output import Output, percent, seconds, size
from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster
from autopar.explain.formulas import formulas_of
from autopar.explain.ranking import Cost, block_costs, collectives, operations
from autopar.explain.reasons import changes, parts_of_step, sentences
from autopar.explain.what_if import asked, differences, parse_question
from autopar.ir.planfile import Plan, load
from autopar.solve.baselines import baselines
from autopar.solve.options import SearchOptions
from autopar.solve.report import as_baseline
from autopar.solve.variants import unvaried

_SHOWN = 10
_HEADER = ("what", "where", "source", "axis", "times", "a step", "share")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Explains the plan, or with ``--what-if`` plans again under a constraint and shows the difference."""
    plan = load(arguments.plan)
    cluster = Cluster.from_dict(plan.document.cluster.description)
    evaluation = evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer)
    if arguments.formulas:
        _formulas(plan, cluster, evaluation, output)
    elif arguments.what_if:
        _what_if(plan, cluster, evaluation, arguments, output)
    else:
        _explain(plan, cluster, evaluation, output)
    return 0


def _explain(plan: Plan, cluster: Cluster, evaluation: Evaluation, output: Output) -> None:
    graph, candidate = plan.graph, plan.candidate
    said = list(sentences(graph, candidate, cluster, evaluation))
    output.text(f"{plan}\n" + "\n".join(said))
    costs = block_costs(graph, candidate, cluster)
    ranked = {
        "ops": operations(graph, candidate, costs)[:_SHOWN],
        "collectives": collectives(graph, candidate, costs, evaluation)[:_SHOWN],
    }
    step = evaluation.step_seconds
    for name, title in (("ops", "The costliest operations"), ("collectives", "The costliest collectives, hidden or not")):
        output.table(title, _HEADER, [_row(cost, step) for cost in ranked[name]])
    tried = changes(graph, candidate, cluster, plan.document.optimizer)
    rows = [
        (c.name, seconds(c.step_seconds), f"{c.step_seconds / step - 1:+.1%}", *_memory(c.peak_memory_bytes, c.fits))
        for c in tried
    ]
    output.table("One change, all else equal", ("change", "step", "difference", "peak memory", "fits"), rows)
    others = _baselines(plan, cluster, evaluation, output)
    output.document(
        {
            "reasons": said,
            "step_seconds": step,
            "parts": dict(parts_of_step(evaluation)),
            **{name: [_json(cost, step) for cost in each] for name, each in ranked.items()},
            "changes": [
                {"name": c.name, "step_seconds": c.step_seconds, "peak_memory_bytes": c.peak_memory_bytes, "fits": c.fits}
                for c in tried
            ],
            "baselines": others,
        }
    )


def _formulas(plan: Plan, cluster: Cluster, evaluation: Evaluation, output: Output) -> None:
    costs = block_costs(plan.graph, plan.candidate, cluster)
    found = [
        *operations(plan.graph, plan.candidate, costs)[:_SHOWN],
        *collectives(plan.graph, plan.candidate, costs, evaluation)[:_SHOWN],
    ]
    each = [(cost, list(formulas_of(cost, costs))) for cost in found]
    for cost, lines in each:
        output.text(f"{cost.what} in {cost.where}: {seconds(cost.seconds)} a step, {cost.times} times")
        output.text("".join(f"  {name}\n    " + text.replace("\n", "\n    ") + "\n" for name, _, text in lines))
    keys = ("of", "seconds", "text")
    said = [[dict(zip(keys, line, strict=True)) for line in lines] for _, lines in each]
    step = evaluation.step_seconds
    output.document([{**_json(cost, step), "formulas": texts} for (cost, _), texts in zip(each, said, strict=True)])


def _row(cost: Cost, step: float) -> tuple[Any, ...]:
    return cost.what, cost.where, cost.source, cost.axis or "-", cost.times, seconds(cost.seconds), percent(cost.seconds / step)


def _memory(peak_bytes: int | None, fits: bool) -> tuple[str, str]:
    return size(peak_bytes), "yes" if fits else "no"


def _json(cost: Cost, step: float) -> dict[str, Any]:
    return {
        "what": cost.what,
        "where": cost.where,
        "source": cost.source,
        "axis": cost.axis,
        "times": cost.times,
        "seconds": cost.seconds,
        "share": cost.seconds / step,
        "full_bytes": cost.full_bytes,
    }


def _baselines(plan: Plan, cluster: Cluster, evaluation: Evaluation, output: Output) -> dict[str, Any]:
    """The recipes that people follow, priced now. What the plan's file says was priced when it was made."""
    options = SearchOptions(batch=plan.candidate.batch, precision=plan.candidate.precision, optimizer=plan.document.optimizer)
    found = {each.recipe.key: as_baseline(each) for each in baselines(unvaried(plan.graph), cluster, options)}
    baseline_table(found, evaluation.step_seconds, evaluation.peak_memory_bytes, output)
    return {key: msgspec.to_builtins(each) for key, each in found.items()}


def _what_if(plan: Plan, cluster: Cluster, before: Evaluation, arguments: argparse.Namespace, output: Output) -> None:
    from autopar.planning import parse_force

    question = parse_question(arguments.what_if, parse_force)
    options = SearchOptions(
        batch=plan.candidate.batch,
        precision=plan.candidate.precision,
        optimizer=plan.document.optimizer,
        time_limit_seconds=arguments.time_limit,
    )
    changed, found = asked(unvaried(plan.graph), cluster, options, question, output.progress)
    rows = differences((plan.candidate, before), (found.candidate, found.evaluation), (cluster.size, changed.size))
    output.table(f"What if {arguments.what_if}", ("", "this plan", "then"), rows)
    planned = found.graph or plan.graph
    costs = block_costs(planned, found.candidate, changed)
    top = collectives(planned, found.candidate, costs, found.evaluation)[:5]
    step = found.evaluation.step_seconds
    output.table("Its costliest collectives", _HEADER, [_row(cost, step) for cost in top])
    output.document(
        {
            "what_if": arguments.what_if,
            "before": {"step_seconds": before.step_seconds, "peak_memory_bytes": before.peak_memory_bytes},
            "after": {
                "step_seconds": step,
                "peak_memory_bytes": found.evaluation.peak_memory_bytes,
                "mesh": str(found.candidate.mesh),
                "status": str(found.status),
            },
            "differences": [dict(zip(("what", "before", "after"), row, strict=True)) for row in rows],
        }
    )
