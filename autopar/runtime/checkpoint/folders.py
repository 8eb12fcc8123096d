"""The folders of checkpoints: written aside as ``step_00000100.tmp``, synced, renamed to ``step_00000100``. What is not renamed,
or has no manifest, was never finished."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointProblem
from .branch import Branch, newest_first, read_branch
from .manifest import MANIFEST

LOGGER = logging.getLogger("autopar")
_NAME = re.compile(r"step_([0-9]{8,18})(\.old)?")
_ASIDE = re.compile(r"step_[0-9]{8,18}\.tmp")


def folder_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step_{step:08d}"


def candidates(folder: Path, step: int | None = None) -> list[Path]:
    """The finished checkpoints, of one `step` where that is given: the one that was written last, then those that its training
    came by, then others, each newest first. `folder` may be a checkpoint itself."""
    if (folder / MANIFEST).is_file():
        return [folder]
    found: dict[Path, tuple[int, bool]] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and step in (None, int(match[1])):
                found[path] = (int(match[1]), match[2] is None)
    return newest_first(found)


def begin(folder: Path, step: int) -> Path:
    """A new folder to write into; what earlier processes left unfinished is removed."""
    if not folder.is_dir() and folder.exists():
        raise CheckpointProblem(f"{folder} is a file: name a folder for checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path)
    aside = folder / f"{folder_name(step)}.tmp"
    aside.mkdir()
    return aside


def finish(aside: Path, step: int) -> Path:
    """Gives the written folder its name, by which it is found from now on; one of that name is replaced."""
    target = aside.parent / folder_name(step)
    old = target.with_name(f"{target.name}.old")
    sync(aside)
    if target.exists():
        remove(old)
        target.rename(old)
    aside.rename(target)
    sync(aside.parent)
    remove(old)
    return target


def keep_newest(folder: Path, keep: int, newest: Path) -> list[Path]:
    """Removes all but `keep` checkpoints: `newest`, and of the whole ones what stands first in `candidates`. Returns those that a
    training had left which went back to an earlier one: nobody would expect that they are gone."""
    line = (read_branch(newest) or Branch()).ancestors
    others = sorted((path for path in candidates(folder) if path != newest), key=lambda path: read_branch(path) is None)
    gone = others[keep - 1 :]
    left = [path for path in gone if (own := read_branch(path) or Branch()).number and own.number not in line]
    for path in gone:
        remove(path)
        LOGGER.info("removed %s: the %d newest checkpoints are kept", path, keep)
    return left


def remove(path: Path) -> None:
    """Removes a checkpoint: first its name, so that half of one is never found."""
    if not path.exists():
        return
    aside = path.with_name(f"{path.name.removesuffix('.old')}.tmp")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    shutil.rmtree(aside)


def discard(aside: Path) -> None:
    """Removes a folder that will not be finished."""
    shutil.rmtree(aside, ignore_errors=True)


def sync(folder: Path) -> None:
    """Names in the folder outlast a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def check_step(step: object, keep: object) -> None:
    """CheckpointProblem for what are no numbers of steps and of checkpoints."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise CheckpointProblem(f"step={str(step)[:40]} is no number of steps: pass step=0 or more")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise CheckpointProblem(f"keep={str(keep)[:40]} is no number of checkpoints: pass keep=1 or more, or None to keep all")
