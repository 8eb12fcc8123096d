"""The pictures of the documentation are of the page that is drawn today, and small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.harness.browser import CHROMIUM
from support.pictures import LARGEST_BYTES, PICTURES, draw

import autopar
from autopar.capture.models import load_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"


def test_each_picture_is_small_and_shown() -> None:
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {f"{name}.png" for name in PICTURES}
    assert all((FOLDER / name).stat().st_size <= LARGEST_BYTES for name in files)
    pages = [path.read_text() for path in (ROOT / "README.md", ROOT / "docs" / "report.md")]
    assert files == {Path(name).name for page in pages for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install -y chromium")
def test_pictures_are_made_by_a_command(tmp_path: Path) -> None:
    loaded = load_model("gpt2-tiny", 16, None)
    plan = autopar.plan(loaded.model, "dgx-h100:1", loaded.example_inputs, force="dp=4,tp=2,zero=3", name="gpt2-tiny", batch=16)
    plan.save(tmp_path / "plan.json")
    draw(tmp_path / "plan.json", tmp_path / "pictures")
    for name in PICTURES:
        content = (tmp_path / "pictures" / f"{name}.png").read_bytes()
        width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
        assert content.startswith(b"\x89PNG") and width == 1000 and height > 200, name
