"""The folders of checkpoints, which are written aside as ``step_00000100.tmp``, synced, and renamed to ``step_00000100``, and the
order in which they were written. A folder that is not renamed, or has no manifest, was never finished.

A run that goes back to an earlier checkpoint writes lower steps than those it left. So the newest is the one that was written
last, and an old one is rather kept where the training that goes on came by it than where it was left (numbers in each manifest).
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointProblem, DamagedCheckpoint
from .folder_sync import sync_folder
from .manifest import MANIFEST, MOST_ANCESTORS, Manifest


class Branch(NamedTuple):
    """The place of a checkpoint among those of its folder. `number` counts the checkpoints of a folder in the order in which they
    were written, from 1 (0: by an older autopar, when steps were the order); `ancestors` are the numbers of those that the
    training came by, the latest first."""

    number: int = 0
    ancestors: tuple[int, ...] = ()


def read_branch(checkpoint: Path) -> Branch | None:
    """Return the branch of a checkpoint's folder; None where its manifest is damaged, or not there."""
    path = checkpoint / MANIFEST
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, DamagedCheckpoint):
        return None


@lru_cache(maxsize=4096)
def _read(path: Path, *identity: int) -> Branch:
    """A manifest is never changed, and that of a large model has megabytes."""
    manifest = Manifest.from_bytes(path.read_bytes(), path)
    return Branch(manifest.number, manifest.ancestors)


def next_branch(checkpoints: Sequence[Path], before: Path | None, folder: Path) -> Branch:
    """Return the branch of the next checkpoint of `folder`, which has these, of a training that saved or loaded the one `before`
    last."""
    number = 1 + max((own.number for each in checkpoints if (own := read_branch(each)) is not None), default=0)
    last = read_branch(before) if before is not None and before.parent == folder else None
    line = (last.number, *last.ancestors) if last is not None and last.number else ()
    return Branch(number, line[:MOST_ANCESTORS])


def newest_first(steps: Mapping[Path, tuple[int, bool]]) -> list[Path]:
    """Checkpoints in the order in which they are loaded: the one that was written last, then those that its training came by,
    then others. `steps`: of each its step, and a preference among equal ones. A damaged one stands after those whose
    folder is older, so that it is noticed where it is the newest."""
    branches = {path: read_branch(path) for path in steps}
    whole = {path: branch for path, branch in branches.items() if branch is not None}
    newest = max(whole, key=lambda path: (whole[path].number, steps[path]), default=None)
    line = {whole[newest].number, *whole[newest].ancestors} if newest is not None else set()

    def number(path: Path) -> int:
        own = branches[path]
        if own is not None:
            return own.number
        written = path.stat().st_mtime_ns
        return max((whole[each].number for each in whole if each.stat().st_mtime_ns <= written), default=-1)

    numbers = {path: number(path) for path in steps}
    return sorted(steps, key=lambda path: (numbers[path] in line, numbers[path], path not in whole, steps[path]), reverse=True)


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
    steps: dict[Path, tuple[int, bool]] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and step in (None, int(match[1])):
                steps[path] = (int(match[1]), match[2] is None)
    return newest_first(steps)


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
    """Give the written folder its name, by which it is found from now on; one of that name is replaced."""
    target = aside.parent / folder_name(step)
    old = target.with_name(f"{target.name}.old")
    sync_folder(aside)
    if target.exists():
        remove(old)
        target.rename(old)
    aside.rename(target)
    sync_folder(aside.parent)
    remove(old)
    return target


def keep_newest(folder: Path, keep: int, newest: Path) -> list[Path]:
    """Remove all but `keep` checkpoints: `newest`, and of the whole ones what stands first in `candidates`. Returns those that a
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
    """Remove a checkpoint: first its name, so that half of one is never found."""
    if not path.exists():
        return
    aside = path.with_name(f"{path.name.removesuffix('.old')}.tmp")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    shutil.rmtree(aside)


def discard(aside: Path) -> None:
    """Remove a folder that will not be finished."""
    shutil.rmtree(aside, ignore_errors=True)


def check_step(step: object, keep: object) -> None:
    """Raise a CheckpointProblem for what are no numbers of steps and of checkpoints."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise CheckpointProblem(f"step={str(step)[:40]} is no number of steps: pass step=0 or more")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise CheckpointProblem(f"keep={str(keep)[:40]} is no number of checkpoints: pass keep=1 or more, or None to keep all")
