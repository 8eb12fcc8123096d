"""A measured step: its parts add up, everything is seen, nothing is changed by it, and it stands beside the prediction."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.harness.rank_pool import RankPool

import autopar
from autopar.capture.models import load_model
from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.planning import make_plan
from autopar.report.predicted_step import predicted_step

PLANS = {"dp=2,zero=3": 16, "pp=2": 16}


@cache
def plan_of(force: str) -> Any:
    loaded = load_model("gpt2-tiny", None, None)
    return autopar.plan(
        loaded.model, Cluster.parse("local:2"), loaded.example_inputs, force=force, name="gpt2-tiny", batch=PLANS[force]
    )


def measured(path: str, folder: str) -> dict[str, Any]:
    """On each rank: steps before, while and after they are measured."""
    import copy

    import torch
    import torch.distributed as dist

    from autopar.errors import AutoparError
    from autopar.ir.plan_file.plan_file import load_plan
    from autopar.passes.lower import lower
    from autopar.program.build import build_program
    from autopar.program.export import random_batch
    from autopar.report.predicted_step import predicted_step
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel
    from autopar.runtime.step.inputs import NamedBatch

    plan = load_plan(path)
    program = build_program(plan.graph, plan.candidate).Program(MeshHandle({**build_axes(plan)}))
    generator = torch.Generator().manual_seed(0)
    specs = {b.original_names[s.path]: s for stage in program.roots() for root in stage for b in root.blocks() for s in b.specs}
    state = {name: torch.randn(spec.shape, generator=generator) * 0.02 for name, spec in sorted(specs.items())}
    parallel = Parallel(program, state)
    parallel.__dict__["predicted_step"] = lambda: predicted_step(plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    batch = random_batch(lower(plan.graph, plan.candidate))
    losses: list[float] = []

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = parallel(NamedBatch(batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    start = copy.deepcopy(parallel.state_dict())
    train(8)
    plain, losses = losses, []
    parallel.load_state_dict(start)
    for each in optimizer.state.values():
        for value in each.values():
            value.zero_()
    out: dict[str, Any] = {}
    train(1)
    parallel.measure(steps=2)
    try:
        parallel.report()
    except AutoparError as error:
        out["early"] = str(error)
    train(3)
    with torch.no_grad():
        parallel(NamedBatch(batch))
    train(4)
    report = parallel.report()
    out["same"] = plain == losses
    blocks = list(program.blocks())
    out["hooks"] = sum(len(block._forward_hooks) for block in blocks if not type(block).__name__.startswith("FSDP"))
    out["text"], out["measured"], out["rank"] = str(report), report.measured, dist.get_rank()

    class Writer:
        def __init__(self) -> None:
            self.added: dict[str, tuple[float, int]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.added[tag] = value, step

    writer, lines = Writer(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar.test_report")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    report.to_tensorboard(writer, 7)
    report.log(logger)
    out["scalars"], out["lines"] = writer.added, lines
    report.save(f"{folder}/{dist.get_rank()}.json")
    report.save_trace(f"{folder}/trace{dist.get_rank()}.json")
    out["last"] = sum(seconds for _, seconds in report.spans.get(0, ()))
    return out


def build_axes(plan: Any) -> dict[str, int]:
    """The axes of the program's mesh."""
    stages = plan.candidate.pipeline.stages
    return ({"pp": stages} if stages > 1 else {}) | {axis.name: axis.size for axis in plan.candidate.mesh.axes}


@pytest.mark.parametrize("force", PLANS)
def test_a_measured_step(force: str, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = plan_of(force), tmp_path / "plan.json"
    plan.save(path)
    first, second = ranks.run(measured, str(path), str(tmp_path), world=2)
    assert first["same"] and second["same"] and not first["hooks"]
    assert "parallel.measure(steps=3)" in first["early"] and first["early"] == second["early"]
    assert first["measured"] == second["measured"] and first["text"] == second["text"]
    found = first["measured"]
    parts = ("compute_seconds", "model_wait_seconds", "data_wait_seconds", "pipeline_wait_seconds", "optimizer_seconds")
    for stage in found["stages"]:
        assert sum(stage[part] for part in parts) == pytest.approx(stage["seconds"], rel=1e-9)
        assert 0 < stage["blocks_seconds"] < stage["compute_seconds"] and stage["optimizer_seconds"] > 0
    assert (found["steps"], found["examples"], found["ranks"], found["compiled"]) == (2, 16, 2, False)
    pairs = [(row["stage"], row["block"]) for row in found["blocks"]]
    sent = {(row["stage"], row["kind"], row["axis"]): row["times"] for row in found["collectives"]}
    predicted = {(row["stage"], row["kind"], row["axis"]): row["times"] for row in told(plan)["collectives"]}
    if force == "pp=2":
        assert {(0, "Prologue"), (0, "GPT2Block"), (1, "GPT2Block"), (1, "Epilogue")} <= set(pairs)
        micro_batches = plan.candidate.micro_batches
        assert sent[0, "send", "pp"] == sent[1, "receive", "pp"] == micro_batches
        assert sent[0, "all-reduce", "tied"] == 1 and found["stages"][1]["pipeline_wait_seconds"] > 0
    else:
        assert [block for _, block in pairs] == ["Prologue", "GPT2Block", "Epilogue"]
        assert sent[0, "reduce-scatter", "dp"] == predicted[0, "reduce-scatter", "dp"]
        assert 0 <= predicted[0, "all-gather", "dp"] - sent[0, "all-gather", "dp"] <= 1  # the last block's weights stay
        assert found["stages"][0]["data_wait_seconds"] > 0
    for row in found["memory"]:
        (other,) = [each for each in told(plan)["memory"] if each["stage"] == row["stage"]]
        assert row["parameters"] == pytest.approx(other["parameters"], rel=0.01)
        assert row["peak_bytes"] == pytest.approx(other["peak_bytes"], rel=0.12)
    assert first["lines"] == first["text"].splitlines() and second["lines"] == [] == list(second["scalars"])
    assert first["scalars"]["autopar/step/seconds"] == (found["step_seconds"], 7)
    assert any(tag.startswith("autopar/predicted/stage0/block/GPT2Block") for tag in first["scalars"])
    assert (tmp_path / "0.json").exists() and not (tmp_path / "1.json").exists()
    check_trace(plan, json.loads((tmp_path / "trace0.json").read_text()), first["last"])
    assert not (tmp_path / "trace1.json").exists()
    (tmp_path / "0.json").rename(tmp_path / "measured.json")
    assert main(["compare", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Parts of the step" in said and "GPT2Block" in said and "What is off" in said
    other_plan = tmp_path / "other.json"
    plan_of(next(each for each in PLANS if each != force)).save(other_plan)
    assert main(["compare", str(other_plan), str(tmp_path / "measured.json")]) == 2
    assert "name the plan that ran" in capsys.readouterr().err


def check_trace(plan: Any, trace: Any, seconds: float) -> None:
    """The events of a stage follow each other and fill its step; those of blocks are named as in the predicted trace."""
    from autopar.report.page import plan_timeline
    from autopar.report.timeline import chrome_trace
    from autopar.runtime.report.trace_event import MAIN, MEASURED_PROCESSES

    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] - MEASURED_PROCESSES for event in events} == set(range(plan.candidate.pipeline.stages))
    first = [event for event in events if event["pid"] == MEASURED_PROCESSES]
    assert sum(event["dur"] for event in first) == pytest.approx(1e6 * seconds, abs=1e-3 * len(first)) and seconds > 0
    for before, after in zip(first, first[1:], strict=False):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    names = {event["name"] for event in first}
    assert {"forward GPT2Block", "backward GPT2Block", "optimizer"} <= names
    if plan.candidate.pipeline.stages == 1:  # ranks that share cores: the clock of a pipeline has passes alone
        predicted = chrome_trace(plan, plan_timeline(plan)[1])["traceEvents"]
        main_stream = {each["name"] for each in predicted if each["tid"] == MAIN}
        assert {"forward GPT2Block", "backward GPT2Block", "optimizer"} <= main_stream


def told(plan: Any) -> dict[str, Any]:
    return predicted_step(plan)


def test_predicted_parts_are_the_evaluators() -> None:
    from autopar.cost_models.step.evaluate import evaluate

    for force in PLANS:
        plan = plan_of(force)
        evaluation = evaluate(plan.graph, plan.candidate, Cluster.from_dict(plan.document.cluster.description))
        found = told(plan)
        parts = ("compute_seconds", "model_wait_seconds", "data_wait_seconds", "pipeline_wait_seconds", "optimizer_seconds")
        for row in found["stages"]:
            assert sum(row[part] for part in parts) <= row["seconds"] * (1 + 1e-6) + 1e-9 or force == "pp=2"
        assert found["step_seconds"] == evaluation.step_seconds
        for number, memory in enumerate(evaluation.stage_memory):
            assert found["memory"][number]["peak_bytes"] == memory.peak_bytes - memory.table["base"] - memory.table["slack"]
        blocks = sum(row["forward_seconds"] + row["backward_seconds"] for row in found["blocks"] if row["stage"] == 0)
        assert blocks == pytest.approx(found["stages"][0]["compute_seconds"])


def test_a_step_stands_beside_the_price_of_what_ran() -> None:
    """Compiled blocks or others, whatever the plan was priced as."""
    loaded = load_model("gpt2-tiny", 16)
    eager, compiled = (
        make_plan(loaded.model, "dgx-h100:1", loaded.example_inputs, force="tp=1,zero=2", compile=each) for each in (False, True)
    )
    assert predicted_step(compiled, False) == predicted_step(eager) == predicted_step(eager, False)
    assert predicted_step(eager, True)["step_seconds"] < predicted_step(compiled, False)["step_seconds"]
    assert predicted_step(compiled, None) == predicted_step(compiled) == predicted_step(compiled, True)


@pytest.mark.parametrize("change", ["cut", "version", "negative", "huge", "unknown", "list", "empty"])
def test_a_file_that_is_none(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_of("dp=2,zero=3").save(tmp_path / "plan.json")
    names = "least_processor processor model_wait data_wait pipeline_wait optimizer blocks compute most_compute"
    stage = {f"{name}_seconds": 0.1 for name in names.split()} | {"seconds": 0.1}
    document: Any = {
        "format": "autopar measured step", "version": 1, "ranks": 2, "mesh": {"dp": 2}, "device": "cpu", "steps": 3,
        "micro_batches": 1, "step_seconds": 0.5, "least_step_seconds": 0.4, "between_seconds": 0.0, "examples": 16.0,
        "stages": [{"stage": 0, "ranks": 2, **stage}], "blocks": [], "collectives": [], "memory": [],
    }  # fmt: skip
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(document))
    assert main(["compare", str(tmp_path / "plan.json")]) == 0
    document |= {"version": {"version": 2}, "negative": {"ranks": -1}, "unknown": {"x": 1}, "huge": {"step_seconds": 1e300}}.get(
        change, {}
    )
    text = json.dumps([document] if change == "list" else document)
    path.write_text({"cut": text[: len(text) // 2], "empty": ""}.get(change, text))
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is not a measured step" in said
