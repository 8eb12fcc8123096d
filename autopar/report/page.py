"""The page: markup, style, scripts, plotly.js and the facts in one file that needs no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from autopar.ir.plan_file.plan_file import Plan
from autopar.report.facts import page_facts
from autopar.report.search_facts import SearchedChange

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
