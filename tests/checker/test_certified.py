"""Programs of models under all kinds of plans are proven: what `support/judges/certified_table.py` counts for docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.judges.certified_table import CERTIFIED, DOCUMENT, NO_PROGRAM, PLANS, TITLES, judge, records, sets, table

from autopar.capture import capture


@pytest.mark.parametrize(("name", "kind"), [("mlp", "free choice"), ("mlp", "1f1b"), ("gpt2", "recompute some")])
def test_some(name: str, kind: str) -> None:
    model, inputs = sets()["small"][1](name)
    assert judge(kind, name, model, inputs, capture(model, (), inputs)) == (CERTIFIED, "")


def _models() -> Iterator[tuple[str, str]]:
    for group in ("families", "small", "written", "packages", "unseen"):
        yield from ((group, name) for name in sets()[group][0])


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), list(_models()))
def test_every_model(group: str, name: str) -> None:
    found = list(records([group], [name], PLANS, ()))
    wrong = [each for each in found if each["found"] not in (CERTIFIED, NO_PROGRAM, "no graph")]
    assert not wrong, wrong


def test_the_document_has_a_row_for_each_kind_of_plan() -> None:
    text = DOCUMENT.read_text()
    assert all(f"\n| {kind} | " in text for kind in PLANS)
    record = {"set": TITLES[0], "model": "m", "plan": PLANS[0], "found": CERTIFIED, "why": ""}
    assert table([record])[2].startswith(f"| {PLANS[0]} | 1 of 1 | - |")
