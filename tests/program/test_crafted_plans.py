"""A plan is data: whatever stands in its strings, nothing of it runs, and the program has no code that lowering did not write."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.plans.mutations import part, replaced
from support.plans.tiny_plans import CAPTURED, tiny_document

from autopar.errors import AutoparError, PlanError
from autopar.ir.plan_file.plan_file import check_graph, decode_plan
from autopar.program.build import program_text
from autopar.program.load import load_program

PAYLOADS = (
    'x"""\n__import__("os").system("touch {mark}")\n"""',
    "x\n    import os; os.system('touch {mark}')",
    "x'); __import__('os').system('touch {mark}')  #",
    '"""+str(__import__("os").system("touch {mark}"))+"""',
    "__import__('os').system('touch {mark}') or B",
)
Path_ = tuple[str | int, ...]


def leaves(data: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from leaves(value, (*path, index))
    else:
        yield path, data


def changed(data: dict[str, Any], path: Path_, value: Any) -> bytes:
    """The document with one leaf replaced."""
    copy = json.loads(json.dumps(data))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(copy).encode()


def one_of_each_kind(data: dict[str, Any], kinds: type | tuple[type, ...]) -> list[Path_]:
    """The first leaf of each field, and of each argument's form."""
    found: dict[str, Path_] = {}
    for path, value in leaves(data):
        if isinstance(value, kinds):
            found.setdefault(re.sub(r"\d+", "#", "/".join(map(str, path))), path)
    return list(found.values())


def attempt(kind: str, path: Path_, folder: Path) -> None:
    """PlanError, or a program without the crafted text as code."""
    mark = folder / "made"
    for payload in PAYLOADS:
        try:
            plan = decode_plan(changed(tiny_document(kind), path, payload.replace("{mark}", str(mark))))
            text = program_text(plan.graph, plan.candidate)
        except AutoparError as error:
            assert "\n" not in str(error), (path, payload)
            continue
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert "__import__" not in names and "os" not in names, (path, payload)
        load_program(text)
        assert not mark.exists(), (path, payload)


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each == "pipeline" else [pytest.mark.slow]) for each in CAPTURED]
)
def test_nothing_crafted_runs(kind: str, tmp_path: Path) -> None:
    for path in one_of_each_kind(tiny_document(kind), str):
        attempt(kind, path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAPTURED)
def test_nothing_crafted_runs_wherever_it_stands(kind: str, tmp_path: Path) -> None:
    for path, value in leaves(tiny_document(kind)):
        if isinstance(value, str):
            attempt(kind, path, tmp_path)


def refused(kind: str, path: Path_) -> None:
    """PlanError for a leaf of the graph that is changed to another value of its type."""
    value = part(tiny_document(kind)["graph"], path)
    other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else f"{value}x"
    with pytest.raises(PlanError):
        check_graph(decode_plan(json.dumps(replaced(tiny_document(kind), ("graph", *path), other))), "plan.json")
        pytest.fail(f"{path}: {other!r} was accepted")


@pytest.mark.parametrize("kind", CAPTURED)
def test_a_tampered_graph_is_refused_without_its_model(kind: str) -> None:
    """One leaf of each field of the graph, its interface included: names and constants of arguments, whether they may be left
    out, the form of the result."""
    for path in one_of_each_kind(tiny_document(kind)["graph"], (str, bool, int, float)):
        refused(kind, path)


@pytest.mark.parametrize(("found", "words"), [("", "older autopar"), ("0123456789abcdef", "not the one of its fingerprint")])
def test_another_checksum_is_refused(found: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_graph(decode_plan(changed(tiny_document("dense"), ("graph", "checksum"), found)), "plan.json")


def test_a_schedule_of_any_length_is_refused() -> None:
    """Batch and micro-batches fit together, and the schedule would have 2**31 passes."""
    batch = {**tiny_document("pipeline")["batch"], "global": 2**31, "micro": 1, "num_microbatches": 2**30}
    with pytest.raises(PlanError, match="more than 131072 passes in a step: take larger micro-batches$"):
        decode_plan(json.dumps({**tiny_document("pipeline"), "batch": batch}))


def test_deep_nesting_is_one_line() -> None:
    for text in ("[" * 100_000, '{"schema_version": 2, "graph": ' + "[" * 5_000 + "]" * 5_000 + "}"):
        with pytest.raises(PlanError) as error:
            decode_plan(text)
        assert "\n" not in str(error.value)
