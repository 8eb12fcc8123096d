"""The pages of docs/ say what the code has: functions that exist, the schema as it is, links that lead somewhere, code that
runs."""

from __future__ import annotations

import ast
import os
import re
import runpy
from pathlib import Path

import msgspec
import pytest
from support.harness.rank_pool import RankPool

from autopar.ir.plan_file import document
from autopar.ir.plan_file.codec import file_type

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_function_of_the_optimizer_page_exists() -> None:
    """Each is written as ``file.function`` or ``file.Class.method`` below autopar/solve, or as a dotted module of autopar."""
    text = (ROOT / "docs" / "optimizer.md").read_text()
    names = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py:[A-Za-z_.]+)`", text)
    assert len(names) >= 30, "constraints and bounds are named with their functions"
    for name in names:
        path, function = name.split(":")
        files = [ROOT / "autopar" / "solve" / path, ROOT / "autopar" / path]
        file = next((each for each in files if each.exists()), None)
        assert file is not None, f"{name}: no such file"
        body: list[ast.stmt] = ast.parse(file.read_text()).body
        for part in function.split("."):
            found = [each for each in body if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == part]
            assert found, f"{name}: {file} has no {part}"
            body = found[0].body


def test_the_schema_page_is_the_schema() -> None:
    text = (ROOT / "docs" / "plan_file.md").read_text()
    _, structs = msgspec.json.schema_components([file_type(document.PlanDocument)])
    fields = {key for each in structs.values() for key in each["properties"]}
    said = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert fields <= said, f"docs/plan_file.md lacks {sorted(fields - said)}"
    assert f"Schema version: {document.SCHEMA_VERSION}." in text


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    for name in re.findall(r"`((?:autopar|cost_models|passes|tests|examples|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_readme_is_a_front_door() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def examples() -> list[tuple[str, str]]:
    """(heading, code) of each example of the page on extending."""
    text = (ROOT / "docs" / "extending.md").read_text()
    return re.findall(r"## (.*?)\n.*?```python\n(.*?)```", text, re.S)


@pytest.mark.parametrize(("heading", "code"), examples(), ids=[heading for heading, _ in examples()])
def test_examples_of_extending_run(heading: str, code: str, tmp_path: Path, ranks: RankPool) -> None:
    """Each in a process of its own, whose imports are done."""
    path = tmp_path / "example.py"
    path.write_text(code)
    ranks.run_alone(run_script, str(path), timeout=240)


def run_script(path: str) -> None:
    os.chdir(Path(path).parent)
    runpy.run_path(path, run_name="__main__")
