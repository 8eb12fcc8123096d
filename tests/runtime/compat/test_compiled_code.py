"""Compiled code that goes from one process to another."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from support.harness.rank_pool import RankPool

from autopar.runtime.compat import compile as compiled_code
from autopar.runtime.compat.compile import cache_hits, processor, recorded_code, take_code


def wave(x: torch.Tensor) -> torch.Tensor:
    return (x * 1.2345).sin() + 1


def compiled_in(folder: Path) -> set[str]:
    """Compile into an empty folder; the libraries that are there then, from their folders."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.reset()
    torch.compile(wave)(torch.zeros(64))
    return libraries(folder)


def libraries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.so")}


def move_code(folder: str) -> None:
    """In a process of its own: what is recorded, and what is taken of it."""
    first, same, other = (Path(folder) / name for name in ("first", "same", "other"))
    for name in ("precompiled_headers/a.h.gch", "ab/a.o", "ab/of_another.main.so"):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_bytes(b"large")
    with recorded_code() as code:
        made = compiled_in(first) - {"ab/of_another.main.so"}
        content = code.archive()
    assert any(name.endswith(".main.so") for name in made)
    names = set(ZipFile(BytesIO(content)).namelist())
    assert names == {compiled_code._MEGA_CACHE, *(f"{processor()}/{name}" for name in made)}
    assert len(content) < 1 << 20

    hits = cache_hits()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(same)
    take_code(content)
    assert libraries(same) == made and compiled_in(same) == made and cache_hits() == hits + 1

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_code, "processor", lambda: "another processor")
        take_code(content)
    assert not libraries(other)
    with pytest.raises(Exception, match="zip"):
        take_code(content[:-100])


def test_what_a_process_loads_is_shipped(ranks: RankPool, tmp_path: Path) -> None:
    """Neither precompiled headers, of 150 MB, nor libraries of other graphs; a processor takes no libraries of another one."""
    ranks.run_alone(move_code, str(tmp_path), timeout=300)
