"""The page in a real browser: every panel draws, hovers, zooms, fits the window in both colour schemes, and works by keyboard.

Skips where there is no Chromium (``apt-get install -y chromium``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness.browser import CHROMIUM, Browser

from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.plan_file import Plan
from autopar.report.page import report_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install -y chromium")

CHARTS = ["step", "timeline", "memory", "model-calls", "model", "cluster", "search", "prices"]
CHART_IDS = [f"{name}-chart" if name != "model-calls" else name for name in CHARTS]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    one = Browser()
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(pipelined: Callable[[Pipeline, int], Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a pipeline of two stages, with a measured step: twice what was predicted."""
    from autopar.report.predicted_step import predicted_step

    plan = pipelined(Pipeline(2, 1, "1f1b"), 4)
    predicted = predicted_step(plan)
    zeros = dict.fromkeys(("most_compute_seconds", "blocks_seconds", "least_processor_seconds", "processor_seconds"), 0.0)
    stages = [{key: value if key == "stage" else 2 * value for key, value in row.items()} | zeros for row in predicted["stages"]]
    measured = {
        **{"ranks": 16, "mesh": {"pp": 2, "dp": 4, "tp": 2}, "device": "cuda", "steps": 3, "micro_batches": 4, "compiled": False},
        **{"step_seconds": 2 * predicted["step_seconds"], "least_step_seconds": 0.0, "between_seconds": 0.0, "examples": 16},
        **{"stages": [{"ranks": 8, **row} for row in stages], "blocks": [], "collectives": [], "memory": []},
    }
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_page(plan, measured))
    return path


MIDDLE = """(() => {
    document.documentElement.style.scrollBehavior = "auto";
    const chart = document.getElementById("CHART");
    const largest = () => [...chart.querySelectorAll(".bars .point path, .scatterlayer .points path.point")]
        .map((each) => each.getBoundingClientRect()).sort((a, b) => b.width * b.height - a.width * a.height)[0];
    if (!largest()) return null;
    scrollBy(0, largest().top - 450);
    const box = largest();
    return [box.left + box.width / 2, box.top + box.height / 2];
})()"""
SIZE = """(() => {
    const box = document.querySelector("#CHART .main-svg").getBoundingClientRect();
    return [box.width, box.height];
})()"""
TIMELINE_BOX = """(() => {
    document.documentElement.style.scrollBehavior = "auto";
    const chart = document.querySelector("#timeline-chart .nsewdrag");
    chart.scrollIntoView({block: "center"});
    const box = chart.getBoundingClientRect();
    return [box.left, box.top, box.width, box.height];
})()"""
CHOOSE = """(() => {
    const list = document.getElementById("LIST");
    list.value = "CHOICE";
    list.dispatchEvent(new Event("change"));
})()"""
MEASURED = """document.getElementById("step-chart").data.reduce((sum, trace) =>
    sum + trace.x.reduce((all, x, i) => all + (trace.y[i] === "stage 0, measured" ? x : 0), 0), 0)"""
CONTROLS = (
    """[...document.querySelectorAll("select, button, summary, a[href]")].filter((each) => each.offsetParent !== null).length"""
)
INK = "document.querySelector('#step-chart .xtick text').style.fill"
STATUS = "document.getElementById('timeline-status').textContent"
NOTE = "document.getElementById('cluster-note').textContent"


def middle_of_a_mark(browser: Browser, chart: str) -> tuple[float, float] | None:
    """The middle of the largest bar or of a point of a chart, scrolled into view."""
    place = browser.value(MIDDLE.replace("CHART", chart))
    return (place[0], place[1]) if place else None


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_panel_draws_and_hovers(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.show(page, width, dark)
    assert browser.value("document.documentElement.scrollWidth") <= width
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 300) == dark
    ink = browser.value(INK)
    assert (sum(map(int, ink[4:-1].split(","))) > 400) == dark, "the charts have the colours of the scheme"
    for chart in CHART_IDS:
        size = browser.value(SIZE.replace("CHART", chart))
        assert 200 < size[0] <= width and size[1] > 90, (chart, size)
        assert len(browser.value(f"document.getElementById('{chart}').getAttribute('aria-label')")) > 20
        place = middle_of_a_mark(browser, chart)
        if place is None and chart == "memory-chart":  # areas have no marks
            continue
        assert place is not None, f"{chart} is empty"
        browser.mouse("mouseMoved", place[0] - 3, place[1] - 3)
        browser.mouse("mouseMoved", *place)
        browser.wait(f"document.querySelector('#{chart} .hoverlayer .hovertext') !== null", 10)
        assert browser.value(f"document.querySelector('#{chart} .hoverlayer').textContent.length") > 5
    assert not browser.problems


def test_the_scheme_may_change_while_it_is_open(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, False)
    light = browser.value(INK)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.wait(f"{INK} !== {json.dumps(light)}", 20)
    assert not browser.problems


def test_the_timeline_zooms(browser: Browser, page: Path) -> None:
    """By a drag, by a double click back, and by buttons with the keyboard alone."""
    browser.show(page, 1280, False)
    whole = browser.value(STATUS)
    left, top, wide, high = browser.value(TIMELINE_BOX)
    y = top + high / 2
    browser.mouse("mouseMoved", left + wide * 0.3, y)
    browser.mouse("mousePressed", left + wide * 0.3, y, "left")
    for share in (0.35, 0.45, 0.5):
        browser.mouse("mouseMoved", left + wide * share, y, "left")
    browser.mouse("mouseReleased", left + wide * 0.5, y, "left")
    browser.wait(f"{STATUS} !== {json.dumps(whole)}", 10)
    first, last = browser.value("document.getElementById('timeline-chart').layout.xaxis.range")
    end = browser.value("timelineEnd()")
    assert last - first == pytest.approx(0.2 * end, rel=0.05)
    browser.value("document.getElementById('timeline-reset').focus()")
    browser.key("Enter", 13, "\r")
    browser.wait(f"{STATUS} === {json.dumps(whole)}", 10)
    browser.value("document.getElementById('timeline-in').focus()")
    for _ in range(3):
        browser.key("Enter", 13, "\r")
    browser.wait("Math.abs((timeline.range[1] - timeline.range[0]) / timelineEnd() - 0.125) < 1e-6", 10)
    assert not browser.problems


def choose(browser: Browser, name: str, choice: int) -> None:
    browser.value(CHOOSE.replace("LIST", name).replace("CHOICE", str(choice)))


def test_the_streams_of_a_stage_and_other_blocks_can_be_chosen(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, False)
    choose(browser, "timeline-view", 2)
    browser.wait("document.querySelector('#timeline-chart').layout.yaxis.categoryarray.includes('main stream')", 10)
    choose(browser, "memory-stage", 1)
    browser.wait("document.getElementById('memory-chart').getAttribute('aria-label').includes('stage 1')", 10)
    choose(browser, "model-block", 0)
    browser.wait("document.getElementById('model-chart').getAttribute('aria-label').includes(facts.model.blocks[0].path)", 10)
    choose(browser, "cluster-axis", 0)
    browser.wait(f"{NOTE}.includes('first group of pp')", 10)
    assert not browser.problems


def test_all_controls_are_reached_by_the_tab_key_and_have_names(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, False)
    controls = browser.value(CONTROLS)
    reached = set()
    for _ in range(controls + 30):
        browser.key("Tab", 9)
        reached.add(browser.value("document.activeElement.id || document.activeElement.tagName"))
    buttons = {f"timeline-{name}" for name in ("in", "out", "left", "right", "reset", "view")}
    lists = {"memory-stage", "model-block", "model-axis", "cluster-axis"}
    assert buttons | lists | {"SUMMARY", "A"} <= reached
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "combobox", "link", "image", "img", "region", "table"}
    unnamed = [
        each for each in nodes
        if each.get("role", {}).get("value") in roles and not each.get("ignored") and not each.get("name", {}).get("value")
    ]  # fmt: skip
    assert not unnamed


def test_measured_seconds_stand_beside_the_predicted(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, False)
    rows = browser.value("document.getElementById('step-chart').layout.yaxis.categoryarray")
    assert len(rows) == 4 and sum("measured" in row for row in rows) == 2
    total = browser.value(MEASURED)
    assert total == pytest.approx(2 * browser.value("facts.step.ends[0]"), rel=1e-6)


def test_a_plan_of_16384_devices(browser: Browser, pipelined: Callable[..., Plan], tmp_path: Path) -> None:
    """2,048 nodes and 256 micro-batches: the page is written and drawn at once, and says what it leaves out."""
    plan = pipelined(Pipeline(2, 1, "1f1b"), 256, 2048)
    assert plan.candidate.devices == 16384
    path = tmp_path / "large.html"
    began = time.process_time()
    path.write_text(report_page(plan))
    assert time.process_time() - began < 2
    browser.show(path, 1280, False)
    assert "of 2,048 nodes are drawn" in browser.value(NOTE)
    assert "1,026 of 1,026 spans" in browser.value(STATUS)
    assert browser.value("document.querySelectorAll('#timeline-chart .bars .point').length") < 1028, (
        "narrow bars are drawn together"
    )
    assert not browser.problems
