"""Forty models that were chosen before anybody looked what becomes of them: each is equal to one process, or fairly refused."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import pytest
from support.harness.rank_pool import RankPool
from support.models.unseen.catalog import specimen, unseen
from support.models.unseen.names import NAMES
from support.models.unseen.vision_language import reported
from support.models.zoo.verified import verdict

REFUSED: Mapping[str, str] = {}
"""Those that capture refuses, with why; the line names file, line and remedy."""
NEEDS = {"DetrForObjectDetection": "scipy", "YolosForObjectDetection": "scipy"}


def test_the_list_is_the_one_that_was_chosen() -> None:
    assert list(unseen()) != [] and set(unseen()) == set(NAMES.split())


def check(name: str, ranks: RankPool) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: pip install --no-deps --target ../zoo {NEEDS[name]}")
    found = verdict(*specimen(name), "dp=2,tp=2", ranks)
    if name in REFUSED:
        assert found.startswith("refused: ") and REFUSED[name] in found
    else:
        assert found == "equal"


def test_one_equals_one_process(ranks: RankPool) -> None:
    check("Wav2Vec2ForCTC", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.split(), *reported()])
def test_each(name: str, ranks: RankPool) -> None:
    check(name, ranks)
