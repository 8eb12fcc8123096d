"""The page: markup, style, scripts, plotly.js and the facts in one file that needs no network. The facts are all that the page
shows, as plain data: one entry a panel."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from autopar.cost_models.breakdown.step_timeline import StepTimeline, step_timeline
from autopar.cost_models.hardware.cluster import Cluster
from autopar.explain.reasons import plan_reasons, step_losses
from autopar.ir.plan_file.plan_file import Plan
from autopar.report.cluster_facts import cluster_facts
from autopar.report.memory_facts import memory_facts
from autopar.report.model_facts import model_facts
from autopar.report.predicted_step import described_cluster
from autopar.report.search_facts import SearchedChange, budget_facts, price_facts, search_facts, what_if_facts
from autopar.report.step_facts import measured_facts, step_facts
from autopar.report.timeline import timeline_facts


def plan_timeline(plan: Plan) -> tuple[Cluster, StepTimeline]:
    """Return the plan's cluster and its simulated step. PlanError where the file does not describe the cluster."""
    cluster = described_cluster(plan)
    return cluster, step_timeline(plan.graph, plan.candidate, cluster, plan.document.optimizer)


def page_facts(
    plan: Plan, measured: dict[str, Any] | None = None, searched: Sequence[SearchedChange] = ()
) -> dict[str, Any]:
    """Return the facts of each panel. `measured` is the step that `parallel.report().save` wrote, `searched` what was planned
    under other constraints."""
    cluster, timeline = plan_timeline(plan)
    step = step_facts(plan, timeline)
    return {
        "head": head_facts(plan, cluster, timeline),
        "step": step,
        "measured": measured_facts(plan, measured),
        "timeline": timeline_facts(plan, timeline),
        "memory": memory_facts(plan, cluster, timeline),
        "model": model_facts(plan, timeline),
        "cluster": cluster_facts(plan, cluster, timeline),
        "search": search_facts(plan, timeline.evaluation),
        "prices": price_facts(plan, timeline.evaluation),
        "what_if": what_if_facts(plan, cluster, searched),
        "budgets": budget_facts(plan, cluster, timeline.evaluation),
    }


def head_facts(plan: Plan, cluster: Cluster, timeline: StepTimeline) -> dict[str, Any]:
    """Return the title, the figures of the step, and why it takes as long (`explain.reasons`)."""
    document, evaluation = plan.document, timeline.evaluation
    losses = step_losses(plan.graph, plan.candidate, cluster, evaluation, document.optimizer)
    tokens = document.batch.seq and plan.candidate.batch * document.batch.seq
    rate = tokens / evaluation.step_seconds / plan.candidate.devices if tokens and evaluation.step_seconds else None
    return {
        "title": f"{document.model.name} on {document.cluster.name}",
        "devices": plan.candidate.devices,
        "device": cluster.device.name,
        "plan": plan.describe(),
        "parameters": document.model.params,
        "batch": plan.candidate.batch,
        "micro_batches": plan.candidate.micro_batches,
        "sequence": document.batch.seq,
        "step_seconds": evaluation.step_seconds,
        "tokens_per_second_per_device": rate,
        "mfu": evaluation.mfu,
        "tflops_per_device": evaluation.tflops_per_device,
        "peak_bytes": evaluation.peak_memory_bytes,
        "budget_bytes": evaluation.memory_budget_bytes,
        "lower_bound_seconds": document.predicted.lower_bound_seconds,
        "ideal_seconds": losses.ideal_seconds,
        "losses": [list(part) for part in losses.parts],
        "reasons": [str(losses), *_faster(plan), *plan_reasons(plan.graph, plan.candidate, cluster, evaluation)],
    }


def _faster(plan: Plan) -> Iterator[str]:
    """Yield what is faster on other software, and why."""
    for each in plan.document.baselines.values():
        if each is not None and each.reason:
            yield f"{each.title}: {each.reason}."


SCRIPTS = ("base.js", "step.js", "timeline.js", "memory.js", "model.js", "cluster.js", "prices.js", "search.js")
"""In the order in which they are run: each adds its panels, the last one draws them all."""


def report_page(plan: Plan, measured: dict[str, Any] | None = None, searched: Sequence[SearchedChange] = ()) -> str:
    """Return the text of the page. PlanError where the plan's file does not describe its cluster."""
    return page_of(page_facts(plan, measured, searched))


def page_of(facts: dict[str, Any]) -> str:
    """Return the page of facts."""
    scripts = "\n".join(_read(name) for name in SCRIPTS)
    parts = {
        "TITLE": html.escape(facts["head"]["title"]),
        "STYLE": _read("page.css"),
        "FACTS": _in_script(facts),
        "PLOTLY": _read("plotly-basic.min.js"),
        "SCRIPTS": scripts,
    }
    return re.sub("@([A-Z]+)@", lambda mark: parts[mark[1]], _read("page.html"))


def _read(name: str) -> str:
    return (files("autopar.report") / "data" / name).read_text(encoding="utf-8")


def _in_script(facts: dict[str, Any]) -> str:
    """Return JSON that cannot end the element it stands in: names of a user's model are text of others."""
    return json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
