"""Plans changed at random: refused in one line, or used without harm; and every leaf of a plan's graph changed once."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing.attempts import attempt, check_seeds, examples
from support.fuzzing.one_line import answer
from support.plans.mutations import SHAPE_CHANGES, Place, mutated, part, places, replaced, resealed, shapes
from support.plans.tiny_plans import CAPTURED, tiny_document

from autopar.errors import PlanError
from autopar.ir.plan_file.plan_file import check_graph, decode_plan
from autopar.program.build import program_text
from autopar.schedules.pipeline_schedule import check_schedule

VIEWS = ((), ("--memory",), ("--comm",), ("--timeline",), ("--ops",), ("--program",), ("--json",), ("--memory", "--json"))
LARGE = ("graph", "ops", "blocks")
"""Fields that make up most of the file; one half of the changes is elsewhere."""


@cache
def spots(kind: str) -> tuple[list[Place], list[Place]]:
    every = list(places(tiny_document(kind)))
    return every, [at for at in every if at[0] not in LARGE]


def text_of(document: Any) -> bytes:
    try:
        return msgspec.json.encode(document)
    except (TypeError, ValueError, OverflowError, UnicodeError):
        return json.dumps(document).encode()


def changed_plan(draw: random.Random) -> bytes:
    """A plan with one to three changes; now and then its text is cut or patched."""
    kind = draw.choice(CAPTURED)
    document: Any = tiny_document(kind)
    every, small = spots(kind)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            document = mutated(document, draw.choice(small if draw.random() < 0.5 else every), draw)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier change took the place away
    text = text_of(document)
    if draw.random() < 0.05:
        at = draw.randrange(len(text))
        return text[:at] + draw.choice((b"", b"[" * 2000, b'"', b"\xff", b"\x00")) + text[at + draw.randrange(100) :]
    return text


def use(text: bytes, folder: Path, draw: random.Random) -> None:
    """Everything that a command does with a plan's file before it prints."""
    plan = check_graph(decode_plan(text), "plan.json")
    check_schedule(plan.candidate)
    program_text(plan.graph, plan.candidate)


def check(draw: random.Random, folder: Path) -> None:
    text = changed_plan(draw)
    if attempt(lambda: use(text, folder, draw)):
        path = folder / "plan.json"
        path.write_bytes(text)
        said = answer("inspect", path, *draw.choice(VIEWS))
        assert said.is_one_line, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@examples(30)
@given(draw=st.randoms(use_true_random=False))
def test_changed_plans(folder: Path, draw: random.Random) -> None:
    check(draw, folder)


@pytest.mark.slow
def test_ten_thousand_changed_plans(folder: Path) -> None:
    check_seeds(10_000, lambda draw: check(draw, folder))


USES = (("inspect", "--program"), ("inspect", "--comm"), ("inspect", "--memory"), ("explain",), ("export",))


def resealed_plan(draw: random.Random) -> str:
    """A plan with one change of its graph, mostly of a shape, and with checksums as if it had been written so."""
    kind = draw.choice(CAPTURED)
    document: Any = tiny_document(kind)
    if draw.random() < 0.6:
        at = draw.choice(shapes(document))
        document = replaced(document, at, draw.choice(tuple(SHAPE_CHANGES.values()))(part(document, at)))
    else:
        document = mutated(document, draw.choice([at for at in spots(kind)[0] if at[0] == "graph"]), draw)
    try:
        return resealed(document)
    except Exception:  # it is no graph, so that it has no checksum either
        return json.dumps(document)


def check_resealed(draw: random.Random, folder: Path) -> None:
    path, (command, *words) = folder / "plan.json", draw.choice(USES)
    path.write_text(resealed_plan(draw))
    said = answer(command, path, *(words if command != "export" else (folder / "program", "--overwrite")))
    assert said.is_one_line, said


@examples(25)
@given(draw=st.randoms(use_true_random=False))
def test_changed_graphs_with_checksums_made_anew(folder: Path, draw: random.Random) -> None:
    """Whatever a use of the plan runs into is one line: a shape is not the captured one, and no checksum tells."""
    check_resealed(draw, folder)


@pytest.mark.slow
def test_a_thousand_changed_graphs_with_checksums_made_anew(folder: Path) -> None:
    check_seeds(1_000, lambda draw: check_resealed(draw, folder))


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}x" if isinstance(value, str) else 1


def check_leaf(kind: str, at: Place) -> None:
    """Refused, whatever the leaf is."""
    document = tiny_document(kind)
    text = text_of(replaced(document, at, other(part(document, at))))
    with pytest.raises(PlanError) as refused:
        check_graph(decode_plan(text), "plan.json")
        pytest.fail(f"{at} was accepted")
    assert "\n" not in str(refused.value)


def graph_leaves(kind: str) -> list[Place]:
    document = tiny_document(kind)
    return [at for at in spots(kind)[0] if at[0] == "graph" and not isinstance(part(document, at), dict | list)]


@pytest.mark.parametrize("kind", CAPTURED)
def test_a_changed_leaf_of_a_graph_is_refused(kind: str) -> None:
    for at in graph_leaves(kind)[::61]:
        check_leaf(kind, at)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAPTURED)
def test_every_changed_leaf_of_a_graph_is_refused(kind: str) -> None:
    for at in graph_leaves(kind):
        check_leaf(kind, at)
