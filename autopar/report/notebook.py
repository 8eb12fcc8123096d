"""The small report of notebooks: figures, the parts of the step and other software's prices as light markup, without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from autopar.errors import AutoparError
from autopar.explain.reasons import parts_of_step, plan_reasons
from autopar.ir.plan_file.plan_file import Plan
from autopar.report.memory_facts import KIND_WORDS
from autopar.report.page import plan_timeline

_GIB = 2.0**30
_SMALLEST_SHARE = 1e-3
"""The share of the step or the peak from which on a part has a row."""
_BAR = "display:inline-block;height:.7em;background:#2f6fde;vertical-align:baseline"


def small_report(plan: Plan) -> str:
    """Return the report as HTML; of a plan without a cluster the figures of its file alone."""
    return "<div>" + "".join(_parts(plan)) + "</div>"


def _parts(plan: Plan) -> Iterator[str]:
    predicted, document = plan.document.predicted, plan.document
    yield f"<h3>{escape(document.model.name)} on {escape(document.cluster.name)}</h3><p>{escape(plan.describe())}</p>"
    figures = [("step", _seconds(predicted.step_seconds)), ("lower bound", _seconds(predicted.lower_bound_seconds))]
    rate = predicted.tokens_per_second_per_device
    figures.append(("tokens per second and device", f"{rate:,.4g}" if rate else "–"))
    figures.append(("of the peak FLOP/s (MFU)", f"{predicted.mfu:.1%}" if predicted.mfu is not None else "–"))
    figures.append(("memory at the peak", _size(predicted.peak_memory_bytes)))
    yield _table(("", "predicted"), figures)
    try:
        cluster, timeline = plan_timeline(plan)
    except AutoparError as error:
        yield f"<p>{escape(str(error))}</p>"
        return
    evaluation = timeline.evaluation
    yield "".join(f"<p>{escape(line)}</p>" for line in plan_reasons(plan.graph, plan.candidate, cluster, evaluation))
    rows = [
        (name, _seconds(seconds), _bar(seconds / evaluation.step_seconds))
        for name, seconds in parts_of_step(evaluation)
        if seconds >= _SMALLEST_SHARE * evaluation.step_seconds
    ]
    yield _table(("where each second goes", "a step", "share"), rows, raw=2)
    least = _SMALLEST_SHARE * evaluation.peak_memory_bytes
    kinds = [(KIND_WORDS[kind], _size(size)) for kind, size in evaluation.memory if size >= least]
    yield _table(("memory of the fullest device", "at its peak"), kinds)
    others = [(each.title or key.upper(), each) for key, each in document.baselines.items() if each is not None]
    if others:
        prices = [
            (
                title,
                each.software or "our programs",
                _seconds(each.step_seconds if each.fits else None),
                each.memory or each.problem,
            )
            for title, each in others
        ]
        yield _table(("by hand", "software", "a step", "memory"), prices)
    yield "<p>The whole page: <code>autopar report plan.json -o report.html</code></p>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], raw: int = -1) -> str:
    """Return a table; cells of the column `raw` are markup already."""
    head = "".join(f'<th scope="col" style="text-align:left">{escape(each)}</th>' for each in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:left">{cell if column == raw else escape(cell)}</td>' for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _bar(share: float) -> str:
    return f'<span style="{_BAR};width:{max(0.0, 12 * share):.2f}em"></span> {share:.1%}'


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.4g} ms"


def _size(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / _GIB:.4g} GiB" if value >= _GIB else f"{1024 * value / _GIB:.4g} MiB"
