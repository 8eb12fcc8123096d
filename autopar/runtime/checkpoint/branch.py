"""The order in which checkpoints were written, and which ones a training came by: numbers in each manifest.

A run that goes back to an earlier checkpoint writes lower steps than those it left. So the newest is the one that was written
last, and an old one is rather kept where the training that goes on came by it than where it was left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..errors import DamagedCheckpoint
from .manifest import MANIFEST, MOST_ANCESTORS, Manifest


class Branch(NamedTuple):
    """`number` counts the checkpoints of a folder in the order in which they were written, from 1 (0: by an older autopar, when
    steps were the order); `ancestors` are the numbers of those that the training came by, the latest first."""

    number: int = 0
    ancestors: tuple[int, ...] = ()


def read_branch(checkpoint: Path) -> Branch | None:
    """Of a checkpoint's folder; None where its manifest is damaged, or not there."""
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
    """For the next checkpoint of `folder`, which has these, of a training that saved or loaded the one `before` last."""
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
