"""Public recipes of Megatron Bridge, torchtitan, DeepSpeed's examples and accelerate: their knobs, read by `fit`. The file in
``tests/data`` says of which file and commit each is."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from autopar.cost_models.hardware.cluster import Cluster, preset_with_devices
from autopar.software.files.text import text_of
from autopar.software.fit import Fit, fit, read_job
from autopar.software.models import model_of
from autopar.software.record import Given

DATA = Path(__file__).parents[1] / "data" / "public_recipes.json"
ENDINGS = {"overrides": "txt", "toml": "toml", "json": "json", "yaml": "yaml"}


@lru_cache(maxsize=1)
def recipes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DATA.read_text())
    return found


def cluster_of(recipe: dict[str, Any]) -> Cluster:
    return preset_with_devices(recipe["cluster"], recipe["devices"])


def judged(recipe: dict[str, Any], folder: Path, better: int = 0) -> Fit:
    path = folder / f"recipe.{ENDINGS[recipe['style']]}"
    path.write_text(text_of(recipe["style"], recipe["values"]))
    given = Given(devices=recipe["devices"], seq=recipe.get("seq", 0))
    software, entries, job = read_job(str(path), given, recipe["software"])
    model = model_of(recipe["model"] or job.model, job.seq or recipe.get("seq", 0), lambda *_: pytest.fail("captured"))
    return fit(str(path), software, entries, job, model, cluster_of(recipe), better)


def test_every_recipe_is_read(tmp_path: Path) -> None:
    """All of them, and at least 60."""
    assert len(recipes()) >= 60
    for recipe in recipes():
        path = tmp_path / f"recipe.{ENDINGS[recipe['style']]}"
        path.write_text(text_of(recipe["style"], recipe["values"]))
        software, _, job = read_job(str(path), Given(devices=recipe["devices"], seq=recipe.get("seq", 0)))
        assert software.name == recipe["software"], recipe["id"]
        assert job.model or recipe["model"], recipe["id"]


@pytest.mark.parametrize("place", range(0, 180, 25))
def test_a_recipe_is_judged(place: int, tmp_path: Path) -> None:
    found = judged(recipes()[place], tmp_path)
    assert found.priced is not None or found.problems, recipes()[place]["id"]


@pytest.mark.slow
def test_what_is_published_starts_and_fits(tmp_path: Path) -> None:
    """Performance recipes of Megatron Bridge are run by its authors: nearly all are said to start and to fit (docs/software/
    has those that are not)."""
    wrong = []
    for recipe in recipes():
        if recipe["software"] == "megatron":
            found = judged(recipe, tmp_path)
            wrong += [(recipe["id"], found.problems)] * (not found.fits)
    assert len(wrong) <= 0.15 * len(recipes()), wrong
