"""The panels' numbers are those of the evaluator, and add up to them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.memory_events import KINDS
from autopar.cost_models.tensors.saved_tensors import saves_from_file
from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.document import ClusterInfo
from autopar.ir.plan_file.plan_file import Plan
from autopar.report.page import page_facts, page_of, report_page
from autopar.report.search_facts import SearchedChange

ACTIONS = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
PIPELINES = {
    "1f1b": Pipeline(2, 1, "1f1b"),
    "zb-h1": Pipeline(2, 1, "zb-h1"),
    "interleaved": Pipeline(2, 2, "1f1b"),
    "synthesized": Pipeline(2, 1, "mine", actions=ACTIONS),
    "two weight versions": Pipeline(2, weight_versions=2),
}


@pytest.fixture(params=["one stage", *PIPELINES])
def plan(request: pytest.FixtureRequest, one_stage: Plan, pipelined: Callable[[Pipeline, int], Plan]) -> Plan:
    return one_stage if request.param == "one stage" else pipelined(PIPELINES[request.param], 4)


def evaluation_of(plan: Plan) -> Evaluation:
    cluster = Cluster.from_dict(plan.document.cluster.description)
    return evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer)


def test_panels_add_up_to_the_evaluation(plan: Plan) -> None:
    facts, evaluation = page_facts(plan), evaluation_of(plan)
    step = facts["step"]
    assert step["step_seconds"] == evaluation.step_seconds
    for stage, time in enumerate(evaluation.stages):
        assert sum(part["seconds"][stage] for part in step["parts"]) == pytest.approx(time.end_seconds, rel=1e-9)
    bottleneck = {part["name"]: part["seconds"][evaluation.bottleneck] for part in step["parts"]}
    assert bottleneck["compute"] == pytest.approx(evaluation.compute_seconds, rel=1e-9)
    assert bottleneck["waits for the data axis"] == pytest.approx(evaluation.stall_seconds, rel=1e-6, abs=1e-12)
    assert bottleneck["optimizer"] == pytest.approx(evaluation.optimizer_seconds, rel=1e-9)
    timeline = facts["timeline"]
    assert timeline["flushed"] == (plan.candidate.pipeline.weight_versions == 1)
    for stage, time in zip(timeline["stages"], evaluation.stages, strict=True):
        end = stage["end"] * timeline["unit_seconds"]
        assert end == pytest.approx(time.end_seconds, rel=1e-6) or (not timeline["flushed"] and end > time.end_seconds)
    memory = facts["memory"]
    for stage, each in zip(memory["stages"], evaluation.stage_memory, strict=True):
        assert sum(stage["peak"]) == stage["peak_bytes"] == each.peak_bytes and stage["budget_bytes"] == each.budget_bytes
        if not timeline["flushed"]:
            assert stage["events"] == []  # the second version is in the peak alone
            continue
        totals = [sum(column[event] for column in stage["events"]) for event in range(len(stage["places"]))]
        assert max(totals) == pytest.approx(each.peak_bytes, abs=len(KINDS))
    calls = facts["model"]["calls"]
    assert [call[0] for call in calls] == [call.prefix or call.block for call in plan.graph.calls]
    for index, stage in enumerate(evaluation.stages):
        assert [place for place, call in enumerate(calls) if call[2] == index] == sorted(stage.calls)


def test_exposed_communication_by_axis_adds_up(plan: Plan) -> None:
    evaluation = evaluation_of(plan)
    parts = [seconds for _, seconds in evaluation.exposed_axis_seconds]
    waits = evaluation.host_stall_seconds + evaluation.launch_stall_seconds
    assert sum(parts) + waits == pytest.approx(evaluation.exposed_seconds, rel=1e-9)
    communicated = dict(evaluation.axis_seconds)
    assert all(seconds <= communicated[axis] * (1 + 1e-9) for axis, seconds in evaluation.exposed_axis_seconds)


def test_overlapped_collectives_are_exposed_in_part(one_stage: Plan) -> None:
    """Software that overlaps the collectives of model axes: what is left is less, and still divided by axis."""
    cluster = Cluster.from_dict(one_stage.document.cluster.description)
    overlapped = replace(cluster, overlap=replace(cluster.overlap, model_parallel=True))
    before, after = (evaluate(one_stage.graph, one_stage.candidate, each) for each in (cluster, overlapped))
    exposed = [sum(seconds for _, seconds in each.exposed_axis_seconds) for each in (before, after)]
    assert exposed[1] < exposed[0]
    waits = after.host_stall_seconds + after.launch_stall_seconds
    assert exposed[1] + waits == pytest.approx(after.exposed_seconds, rel=1e-9)


def test_every_operation_has_its_placements_and_source(one_stage: Plan) -> None:
    blocks = page_facts(one_stage)["model"]["blocks"]
    operations = [each for block in blocks for each in block["operations"]]
    assert len(operations) == sum(len(block.nodes) for block in one_stage.graph.blocks)
    assert all(each["results"] and len(each["sharding"]) == 2 for each in operations)
    assert any(".py:" in each["source"] for each in operations)
    assert {"column-parallel", "row-parallel"} <= {words for each in operations for words in each["sharding"]}


def test_axes_lie_on_the_links_of_the_cluster(pipelined: Callable[[Pipeline, int], Plan]) -> None:
    axes = page_facts(pipelined(Pipeline(2, 1, "1f1b"), 4))["cluster"]["axes"]
    assert [(axis["name"], axis["size"], axis["stride"]) for axis in axes] == [("pp", 2, 8), ("dp", 4, 2), ("tp", 2, 1)]
    assert [level["link"] for axis in axes for level in axis["levels"]] == ["infiniband", "nvlink", "nvlink"]


def test_what_the_file_lacks_is_said(one_stage: Plan) -> None:
    from autopar.ir.plan_file.document import SearchInfo

    bare = Plan(replace(one_stage.document, search=SearchInfo()), one_stage.graph, one_stage.candidate)
    search = page_facts(bare)["search"]
    assert search["points"] == [] and "no search" in search["missing"][0]


def test_the_page_needs_no_network_and_holds_any_name(one_stage: Plan) -> None:
    facts = page_facts(one_stage)
    facts["head"]["title"] = "</script><script>alert(1)</script> @PLOTLY@"
    page = page_of(facts)
    assert page.count("</script>") == page.count("<script") == 3
    head = page.partition("<script")[0]
    assert "src=" not in head and "http://" not in head and "https://" not in head
    assert len(page) < 1.7 * 2**20


def test_commands_write_files_and_refuse_in_a_line(
    plan_path: Path, one_stage: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["report", str(plan_path), "-o", str(page)]) == 0 and page.read_text().startswith("<!doctype html>")
    assert main(["trace", str(plan_path), "-o", str(trace)]) == 0 and json.loads(trace.read_text())["traceEvents"]
    unnamed = Plan(
        replace(one_stage.document, cluster=ClusterInfo("mine", one_stage.document.cluster.devices)),
        one_stage.graph,
        one_stage.candidate,
    )
    unnamed.save(tmp_path / "unnamed.json")
    (tmp_path / "broken.json").write_text("{")
    capsys.readouterr()
    for words in (
        ["report", str(tmp_path / "missing.json")],
        ["report", str(tmp_path / "broken.json")],
        ["report", str(tmp_path / "unnamed.json"), "-o", str(page)],
        ["trace", str(tmp_path / "unnamed.json"), "-o", str(trace)],
        ["report", str(plan_path), "-o", str(tmp_path / "no folder" / "page.html")],
        ["report", str(plan_path), "--measured", str(plan_path), "-o", str(page)],
    ):
        assert main(words) == 2, words
        err = capsys.readouterr().err
        assert err.startswith("autopar: error: ") and err.count("\n") == 1, err


def test_notebooks_show_the_small_report(plan: Plan) -> None:
    text = plan._repr_html_()
    assert plan.document.model.name in text and "<script" not in text and len(text) < 20_000
    assert f"{evaluation_of(plan).step_seconds * 1e3:.4g} ms" in text or f"{evaluation_of(plan).step_seconds:.4g} s" in text


def test_a_plan_without_a_cluster_has_a_small_report_too(one_stage: Plan) -> None:
    unnamed = replace(one_stage.document, cluster=ClusterInfo("mine", one_stage.document.cluster.devices))
    assert "does not describe its cluster" in Plan(unnamed, one_stage.graph, one_stage.candidate)._repr_html_()


def test_importing_autopar_does_not_import_the_report() -> None:
    code = "import sys, autopar, autopar.cli; assert not [name for name in sys.modules if name.startswith('autopar.report')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_losses_add_up_to_the_step(plan: Plan) -> None:
    """From the model's FLOPs at the peak; the largest stands in the first sentence of the page."""
    head, evaluation = page_facts(plan)["head"], evaluation_of(plan)
    assert head["ideal_seconds"] == pytest.approx(evaluation.mfu * evaluation.step_seconds, rel=1e-9)
    lost = sum(seconds for _, seconds in head["losses"])
    assert head["ideal_seconds"] + lost == pytest.approx(evaluation.step_seconds, rel=1e-9)
    largest, seconds = max(head["losses"], key=lambda part: part[1])
    assert f"largest losses: {seconds:.3g} s {largest}" in head["reasons"][0]


def test_recomputation_is_a_loss(one_stage: Plan) -> None:
    blocks = tuple(replace(block, recompute=True) for block in one_stage.candidate.blocks)
    again = replace(one_stage, candidate=replace(one_stage.candidate, blocks=blocks))
    before, after = (dict(page_facts(each)["head"]["losses"]) for each in (one_stage, again))
    assert after["what the backward computes again"] > 0.2 * before["matrix products below the peak"]
    assert before.get("what the backward computes again", 0.0) < after["what the backward computes again"]


def test_budgets_are_never_slower_with_more_memory(plan: Plan) -> None:
    facts = page_facts(plan)
    rows = facts["budgets"]
    assert sum(row["name"] == "this plan" for row in rows) == 1
    others = [row for row in rows if row["name"] != "this plan"]
    assert [row["peak_bytes"] for row in rows] == sorted(row["peak_bytes"] for row in rows)
    assert [row["step_seconds"] for row in others] == sorted((row["step_seconds"] for row in others), reverse=True)
    known = {row["name"]: row for row in facts["what_if"]}
    for row in rows:
        change = known.get(row["name"].removeprefix("this plan, "))
        assert change is None or (change["step_seconds"], change["fits"]) == (row["step_seconds"], row["fits"])


def test_a_new_search_adds_a_row(plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `explain --what-if` finds; and what does not fit is a line."""
    out = tmp_path / "report.html"
    words = ["--what-if", "memory=40", "--what-if", "memory=0.001"]
    assert main(["report", str(plan_path), "-o", str(out), *words]) == 0
    said = capsys.readouterr().err
    assert "planning with memory=40" in said and "memory=0.001: " in said
    assert main(["explain", str(plan_path), "--what-if", "memory=40", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["after"]
    text = out.read_text()
    facts = json.loads(text[text.index('id="facts">') + len('id="facts">') :].partition("</script>")[0])
    (row,) = [row for row in facts["what_if"] if row["name"].startswith("memory=40, searched: ")]
    assert (row["step_seconds"], row["peak_bytes"]) == (after["step_seconds"], after["peak_memory_bytes"])


def test_a_search_that_was_cut_short_says_so(one_stage: Plan) -> None:
    change = SearchedChange("memory=40", one_stage.graph, one_stage.candidate, evaluation_of(one_stage), "Ctrl-C")
    assert change.describe().startswith("memory=40, searched, cut short by Ctrl-C: ")


UNNEEDED = ("torch", "numpy", "scipy", "ortools", "transformers")


@pytest.mark.parametrize("command", ["report", "trace", "inspect"])
def test_who_reads_a_plan_imports_no_torch(command: str, pipelined: Callable[..., Plan], tmp_path: Path) -> None:
    """Of 16,384 devices; torch's import would take longer than all else. What autograd saves stands in the file."""
    path = tmp_path / "plan.json"
    pipelined(Pipeline(2, 1, "1f1b"), 256, 2048).save(path)
    code = (
        "import sys; from autopar.cli import main; status = main(sys.argv[1:]); "
        f"sys.exit(status or str([name for name in {UNNEEDED} if name in sys.modules]))"
    )
    words = [command, str(path), *(["-o", str(tmp_path / "out")] if command != "inspect" else [])]
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert ran.stderr.strip() == "[]"


def test_the_file_says_what_was_observed(one_stage: Plan) -> None:
    """The prices are those without it; and it is what is used."""
    saves = load(one_stage).document.saves
    with saves_from_file(saves):
        before = evaluation_of(one_stage)
    assert before == evaluation_of(one_stage)
    nothing = {key: replace(each, operands=(False,) * len(each.operands)) for key, each in saves.items()}
    with saves_from_file(nothing):
        assert evaluation_of(one_stage).peak_memory_bytes < before.peak_memory_bytes


def test_what_was_edited_is_observed_anew(one_stage: Plan) -> None:
    """So that the prices of a file are those of its graph: of one that no longer saves anything too."""
    document = load(one_stage).document
    assert load(one_stage).saves == document.saves != {}
    nothing = {key: replace(each, operands=(False,) * len(each.operands)) for key, each in document.saves.items()}
    edited = Plan(replace(document, saves=nothing), one_stage.graph, one_stage.candidate)
    assert load(edited).saves == {}
    with saves_from_file(load(edited).saves):
        assert evaluation_of(one_stage) == evaluation_of(edited)


def load(plan: Plan) -> Plan:
    return Plan.from_json(plan.to_json())


def test_the_report_is_the_same_twice(one_stage: Plan) -> None:
    assert report_page(one_stage) == report_page(one_stage)
