"""Searches that time ended: each says so, and none is called optimal beside a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.describe import cut_short_text
from autopar.solve import search_state
from autopar.solve.ilp.linear_model import Status
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

GRAPH, CLUSTER = gpt2_graph(layers=2, batch=16), Cluster.parse("dgx-h100:1")


def searched(monkeypatch: pytest.MonkeyPatch, interrupt: bool = False, slow: bool = False) -> tuple[PlanResult, list[str]]:
    """A search during which, once there is a plan, Ctrl-C comes, or an hour passes."""
    lines: list[str] = []
    passed = [0.0]
    before = search_state.monotonic
    monkeypatch.setattr(search_state, "monotonic", lambda: before() + passed[0])

    def progress(line: str) -> None:
        lines.append(line)
        if interrupt and sum("best" in each for each in lines) == 1:
            raise KeyboardInterrupt
        if "best" in line and slow:
            passed[0] = 3600.0

    return search(GRAPH, CLUSTER, SearchOptions(), progress), lines


def test_a_search_that_is_done_says_nothing_of_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    result, lines = searched(monkeypatch)
    assert result.cut_short == "" and not any("cut short" in line for line in lines)


@pytest.mark.parametrize(("how", "words"), [("interrupt", "an interrupt"), ("slow", "the time limit of 300 s")])
def test_a_search_that_time_ended_says_so(how: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, lines = searched(monkeypatch, **{how: True})
    assert result.cut_short == words
    (line,) = [line for line in lines if "cut short" in line]
    assert line == cut_short_text(words)
    plan = plan_of_result(GRAPH, CLUSTER, result, (), optimizer="adamw")
    assert plan.document.search.cut_short == words


@pytest.mark.parametrize(("gap", "status"), [(0.067, Status.FEASIBLE), (0.0005, Status.OPTIMAL)])
def test_optimal_never_stands_beside_a_gap(gap: float, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = searched(monkeypatch)
    assert replace(result, status=Status.OPTIMAL, gap=gap).status is status
