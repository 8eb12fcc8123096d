"""``autopar explain``: why this plan, what it costs where, and what another one would cost. Needs the file only."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from autopar.cli.console import Console, percent, seconds, size
from autopar.cli.evaluation import with_plan
from autopar.cli.tables.plan import baseline_table
from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.explain.operation_and_collective_rows import (
    CostRow,
    collective_rows,
    offload_rows,
    operation_rows,
    other_collectives,
    other_operations,
    row_formulas,
)
from autopar.explain.reasons import evaluate_changes, parts_of_step, plan_reasons, stage_words, step_losses
from autopar.explain.what_if import compare_plans, parse_what_if, plan_what_if, what_if_options
from autopar.ir.pipeline.stage_variants import without_stage_variants
from autopar.ir.plan_file.plan_file import Plan
from autopar.software.by_hand import with_expert_prices
from autopar.solve.fixed.baselines import baselines
from autopar.solve.plan_of_result import as_baseline
from autopar.solve.problem.pins import constraint_texts
from autopar.solve.space.options import SearchOptions

_SHOWN = 10
_HEADER = ("what", "where", "source", "axis", "times", "a step", "share")


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Explains the plan; with ``--what-if``, plans again under a constraint and shows the difference."""
    cluster = Cluster.from_dict(plan.document.cluster.description)
    evaluation = evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer)
    if arguments.formulas:
        _formulas(plan, cluster, evaluation, console)
    elif arguments.what_if:
        _what_if(plan, cluster, evaluation, arguments, console)
    else:
        _explain(plan, cluster, evaluation, console)
    return 0


def _explain(plan: Plan, cluster: Cluster, evaluation: Evaluation, console: Console) -> None:
    graph, candidate = plan.graph, plan.candidate
    reasons = [f"constrained: {text}" for text in constraint_texts(plan.document.search.constrained)]
    reasons.append(str(step_losses(graph, candidate, cluster, evaluation, plan.document.optimizer)))
    reasons += plan_reasons(graph, candidate, cluster, evaluation)
    console.text(f"{plan}\n" + "\n".join(reasons))
    breakdown = cost_breakdown(graph, candidate, cluster, plan.document.optimizer, evaluation.bottleneck)
    operations, collectives = operation_rows(graph, breakdown), collective_rows(graph, breakdown)
    ranked = {"ops": operations[:_SHOWN], "collectives": collectives[:_SHOWN]}
    step, parts, of_stage = evaluation.step_seconds, parts_of_step(evaluation), stage_words(evaluation)
    console.table(f"The step{of_stage}", ("part", "a step", "share"), [(name, *_share(each, step)) for name, each in parts])
    rest = other_operations(operations[_SHOWN:], breakdown, parts)
    console.table(f"The costliest operations{of_stage}", _HEADER, _rows(ranked["ops"], rest, step))
    more = _show_collectives(f"The costliest collectives{of_stage}", collectives, _SHOWN, console)
    offloads = offload_rows(graph, breakdown)
    if offloads:
        rows = [(each.what, each.where, size(each.full_bytes), each.times, *_share(each.seconds, step)) for each in offloads]
        header = ("what", "where", "bytes", "times", "a step", "share")
        exposed = f"{seconds(evaluation.host_stall_seconds)} of saved tensors' copies are exposed"
        console.table(f"Copies to host memory and back{of_stage}: {exposed}, others run beside the step", header, rows)
    tried = evaluate_changes(graph, candidate, cluster, plan.document.optimizer)
    changes = [
        (c.name, seconds(c.step_seconds), f"{c.step_seconds / step - 1:+.1%}", *_memory(c.peak_memory_bytes, c.fits))
        for c in tried
    ]
    console.table("One change, all else equal", ("change", "step", "difference", "peak memory", "fits"), changes)
    others = _baselines(plan, cluster, evaluation, console)
    console.document(
        {
            "reasons": reasons,
            "step_seconds": step,
            "stage": evaluation.bottleneck,
            "parts": dict(parts),
            **{name: [_json(cost, step) for cost in each] for name, each in ranked.items()},
            "offloads": [_json(cost, step) for cost in offloads],
            "other_ops": dict(rest),
            "other_collectives": dict(more),
            "changes": [{name: value for name, value in asdict(each).items() if name != "force"} for each in tried],
            "baselines": others,
        }
    )


def _formulas(plan: Plan, cluster: Cluster, evaluation: Evaluation, console: Console) -> None:
    breakdown = cost_breakdown(plan.graph, plan.candidate, cluster, plan.document.optimizer, evaluation.bottleneck)
    found = [*operation_rows(plan.graph, breakdown)[:_SHOWN], *collective_rows(plan.graph, breakdown)[:_SHOWN]]
    each = [(row, list(row_formulas(row, breakdown))) for row in found]
    for cost, lines in each:
        console.text(f"{cost.what} in {cost.where}: {seconds(cost.seconds)} a step, {cost.times} times")
        console.text("".join(f"  {name}\n    " + text.replace("\n", "\n    ") + "\n" for name, _, text in lines))
    keys = ("of", "seconds", "text")
    formulas = [[dict(zip(keys, line, strict=True)) for line in lines] for _, lines in each]
    step = evaluation.step_seconds
    console.document([{**_json(cost, step), "formulas": texts} for (cost, _), texts in zip(each, formulas, strict=True)])


def _show_collectives(title: str, every: Sequence[CostRow], count: int, console: Console) -> list[tuple[str, float]]:
    """Print the table of so many collectives, and return the row of the others."""
    sent, more = sum(cost.seconds for cost in every), other_collectives(every[count:])
    header = (*_HEADER[:-1], "of communication")
    console.table(f"{title}: {seconds(sent)}, overlapped or exposed", header, _rows(every[:count], more, sent))
    return more


def _rows(costs: Sequence[CostRow], rest: Sequence[tuple[str, float]], whole: float) -> list[tuple[Any, ...]]:
    """The rows of costs, and those of the rest, with their shares of the whole."""
    rows = [(x.what, x.where, x.source, x.axis or "-", x.times, *_share(x.seconds, whole)) for x in costs]
    return [*rows, *((name, "", "", "-", "-", *_share(each, whole)) for name, each in rest)]


def _share(value: float, whole: float) -> tuple[str, str]:
    return seconds(value), percent(value / whole if whole else 0.0)


def _memory(peak_bytes: int | None, fits: bool) -> tuple[str, str]:
    return size(peak_bytes), "yes" if fits else "no"


def _json(cost: CostRow, step: float) -> dict[str, Any]:
    fields = ("what", "where", "source", "axis", "times", "seconds", "full_bytes")
    return {**{name: getattr(cost, name) for name in fields}, "share": cost.seconds / step}


def _baselines(plan: Plan, cluster: Cluster, evaluation: Evaluation, console: Console) -> dict[str, Any]:
    """The baselines, priced now: those in plan.json were priced when the plan was made."""
    options = SearchOptions(batch=plan.candidate.batch, precision=plan.candidate.precision, optimizer=plan.document.optimizer)
    graph = without_stage_variants(plan.graph)
    recipes = with_expert_prices(baselines(graph, cluster, options), graph, cluster, options, evaluation.step_seconds)
    found = {each.recipe.key: as_baseline(each) for each in recipes}
    baseline_table(found, evaluation.step_seconds, evaluation.peak_memory_bytes, console)
    return {key: msgspec.to_builtins(each) for key, each in found.items()}


def _what_if(plan: Plan, cluster: Cluster, before: Evaluation, arguments: argparse.Namespace, console: Console) -> None:
    question = parse_what_if(arguments.what_if)
    options = what_if_options(plan, arguments.time_limit)
    changed, found = plan_what_if(without_stage_variants(plan.graph), cluster, options, question, console.progress)
    differences = compare_plans((plan.candidate, before), (found.candidate, found.evaluation), (cluster.size, changed.size))
    console.table(f"What if {arguments.what_if}", ("", "this plan", "then"), differences)
    breakdown = cost_breakdown(found.graph, found.candidate, changed, options.optimizer, found.evaluation.bottleneck)
    collectives = collective_rows(found.graph, breakdown)
    _show_collectives(f"Its costliest collectives{stage_words(found.evaluation)}", collectives, 5, console)
    console.document(
        {
            "what_if": arguments.what_if,
            "before": {"step_seconds": before.step_seconds, "peak_memory_bytes": before.peak_memory_bytes},
            "after": {
                "step_seconds": found.evaluation.step_seconds,
                "peak_memory_bytes": found.evaluation.peak_memory_bytes,
                "mesh": str(found.candidate.mesh),
                "status": str(found.status),
            },
            "differences": [dict(zip(("what", "before", "after"), row, strict=True)) for row in differences],
        }
    )
