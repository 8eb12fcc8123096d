"""The text of a pipeline: it parses, model chunks and boundary tensors agree, and only what the schedule needs is written."""

from __future__ import annotations

import ast
from functools import cache

import pytest
from support.harness.end_to_end import Prepared, prepare
from support.plans.pipeline_plans import candidate_text, pipeline_candidate, with_split_block

from autopar.ir.plan import Pipeline
from autopar.ir.schedule import Schedule
from autopar.schedules.check import check


@cache
def prepared(name: str) -> Prepared:
    return with_split_block(prepare("convnet"), "Main", (2, 3, 6)) if name == "convnet" else prepare(name)


def classes(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def fields(made: ast.ClassDef) -> dict[str, ast.expr]:
    found = (node for node in made.body if isinstance(node, ast.Assign))
    return {target.id: node.value for node in found for target in node.targets if isinstance(target, ast.Name)}


def forward(made: ast.ClassDef) -> ast.FunctionDef:
    return next(node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "forward")


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder_decoder", "convnet"])
@pytest.mark.parametrize(
    "pipeline", [Pipeline(2), Pipeline(4, 1, "zb-h1"), Pipeline(2, 2, "zbv")], ids=lambda each: each.schedule
)
def test_chunks_and_boundaries_agree(name: str, pipeline: Pipeline) -> None:
    case = prepared(name)
    if name == "convnet" and pipeline.stages == 2 and pipeline.virtual == 1:
        pipeline = Pipeline(2, cuts=(2,))
    text = candidate_text(case, pipeline_candidate(case, {}, pipeline, 4))
    made = classes(text)
    program = fields(made["Program"])
    boundaries = program["boundaries"]
    assert isinstance(boundaries, ast.Tuple)
    received = [[each.args[0].value for each in one.elts] for one in boundaries.elts]  # type: ignore[attr-defined]
    count = pipeline.stages * pipeline.virtual
    assert len(received) == count - 1
    for number in range(count):
        chunk = made[f"Chunk{number}"]
        batch_inputs = [each.value for each in fields(chunk)["batch_inputs"].elts]  # type: ignore[attr-defined]
        arguments = [each.arg for each in forward(chunk).args.args[1:]]
        assert arguments == [*(received[number - 1] if number else []), *batch_inputs]
        end = forward(chunk).body[-1]
        assert isinstance(end, ast.Return)
        results = end.value.elts if isinstance(end.value, ast.Tuple) else [end.value]
        if number < count - 1:
            assert len(results) == len(received[number])
    used = {node.func.id for each in made.values() for node in ast.walk(each)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    blocks = {key for key, each in made.items() if isinstance(each.bases[0], ast.Name) and each.bases[0].id == "Block"}
    assert blocks <= used
    lines = program["schedule"]
    assert isinstance(lines, ast.Tuple) and len(lines.elts) == pipeline.stages
    schedule = Schedule.parse("\n".join(each.value for each in lines.elts), pipeline.schedule)  # type: ignore[attr-defined]
    check(schedule)


def test_the_split_backward_is_written_where_it_is_used() -> None:
    case = prepared("gpt2")
    assert "self.split_backward" not in candidate_text(case, pipeline_candidate(case, {}, Pipeline(2), 4))
    split = candidate_text(case, pipeline_candidate(case, {}, Pipeline(2, 1, "zb-h1"), 4))
    assert split.count("self.split_backward.linear_kn(") == 4 and split.count("self.split_backward.linear(") == 1


def test_text_is_a_function_of_the_plan() -> None:
    case = prepared("llama")
    candidate = pipeline_candidate(case, {"dp": 2}, Pipeline(2), 4)
    assert candidate_text(case, candidate) == candidate_text(case, candidate)
    assert 'mesh_axes = {"pp": 2, "dp": 2}' in candidate_text(case, candidate)
    assert "PrologueRepeated" in candidate_text(case, candidate)
