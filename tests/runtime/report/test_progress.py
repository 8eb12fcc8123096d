"""Work that takes long says what it does and how far it is: a bar in a terminal, lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool

import autopar
from autopar.capture.models import load_model
from autopar.runtime import progress
from autopar.runtime.progress import Work, advance, working

BAR = """
import random, sys, time
from autopar.runtime import progress
state = random.getstate()
progress.QUIET_SECONDS, progress.BAR_SECONDS = 0.0, 0.01
with progress.working("saving [b]all", 4):
    progress.advance(1, "first")
    time.sleep(1)
    progress.advance(2)
    with progress.working("an inner part"):
        time.sleep(1)
print("done" if random.getstate() == state else "drawn: rich took numbers of the user's generator")
"""


def test_a_bar_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    ran = subprocess.Popen(
        [sys.executable, "-c", BAR], stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    assert ran.communicate()[0] == b"done\n" and ran.returncode == 0
    said = text.decode()
    assert "autopar: saving [b]all: first" in said and "25%" in said and "autopar: an inner part" in said
    assert said.rindex("\x1b[2K") > said.rindex("autopar:"), "the bar is taken away at the end"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    return caplog


def wait_for(lines: pytest.LogCaptureFixture, text: str) -> None:
    """Wait as long as the thread takes to say it."""
    for _ in range(3000):
        if any(text in line for line in lines.messages):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{text} is not in {lines.messages}")


def test_lines_elsewhere(lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(logging.INFO, "autopar")
    with working("loading", 8):
        wait_for(lines, "loading, 0 %, 0 s")
        advance(2, "layers\n.0")
        wait_for(lines, "loading: layers .0, 25 %")
        with working("checking"):
            advance(5)
            wait_for(lines, "checking, ")
        advance(100)
        wait_for(lines, "loading: layers .0, 100 %")
    advance()  # of nothing
    assert not [each for each in threading.enumerate() if each.name == "autopar progress"]


def test_other_ranks_and_short_work_say_nothing(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    lines.set_level(logging.INFO, "autopar")
    monkeypatch.setenv("RANK", "1")
    with working("loading"):
        threading.Event().wait(0.1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(progress, "QUIET_SECONDS", 1000.0)
    with working("loading"):
        threading.Event().wait(0.1)
    assert lines.messages == []


def test_an_error_ends_it(lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="odd"), working("loading"):
        raise ValueError("odd")
    with working("again") as work:
        assert progress._CURRENT.get() is work


def seen_works(patch: pytest.MonkeyPatch) -> list[Work]:
    """The works that begin from now on on this rank."""
    seen: list[Work] = []
    patch.setattr(progress, "_show", lambda work, *_: seen.append(work))
    return seen


def works_of_a_job(folder: str) -> list[tuple[str, float, float]]:
    """On a rank: what is shown of planning, loading, compiling, saving and writing weights: words, done and total."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(torch.distributed.get_rank()) if torch.distributed.is_initialized() else os.environ["RANK"])
        seen = seen_works(patch)
        loaded = load_model("mlp", 32, None, device="cpu")
        inputs: Any = loaded.example_inputs
        parallel = autopar.parallelize(loaded.model, "local:2", inputs, cache=False, force="dp=2,zero=3", compile="eager")
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        parallel(**inputs).backward()
        optimizer.step()
        parallel.save(folder, optimizer, step=1)
        parallel.load(folder, optimizer)
        parallel.save_pretrained(f"{folder}/weights")
        parallel(**{name: value[:8] for name, value in inputs.items()})
    return [(work.words(), work.done, work.total) for work in seen]


def test_what_takes_long_is_shown(ranks: RankPool, tmp_path: Path) -> None:
    """Each to its end: all weights are loaded, all bytes written and read."""
    first, second = ranks.run(works_of_a_job, str(tmp_path), world=2)
    assert second == []
    words = [name for name, _, _ in first]
    expected_words = "planning |loading weights|compiling |saving step 1 to |checking |loading /|writing weights"
    for expected in expected_words.split("|"):
        assert any(name.startswith(expected) for name in words), (expected, words)
    assert all(done == total for _, done, total in first if total), first
    assert sum(total > 0 for _, _, total in first) >= 5
