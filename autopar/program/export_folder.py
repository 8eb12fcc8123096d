"""The folder of an export: written aside, then put in place as a whole. Only files of an earlier export are ever replaced."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from autopar.errors import FileError
from autopar.files import part_of, remove_left_over
from autopar.runtime.checkpoint.folder_sync import sync_folder

MARKER = ".autopar-export.json"
"""Lists the files of an export: what a later one may replace."""


@contextlib.contextmanager
def export_folder(directory: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `directory` when the context ends without an error.

    FileError where `directory` has files and is no export, or is one and `overwrite` is off. Files of the user in an earlier
    export are left alone; so is everything where writing fails.
    """
    part = None
    try:
        target = Path(os.path.realpath(directory))
        _recover(target)
        written = _check(target, overwrite)
        remove_left_over(target)
        part = part_of(target)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        files = sorted(str(path.relative_to(part)) for path in part.rglob("*") if path.is_file())
        (part / MARKER).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
        for path in part.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        _put_in_place(part, target, written)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write to {str(directory)[:200]}: {reason}; what was there before is unchanged") from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _check(target: Path, overwrite: bool) -> frozenset[str]:
    """The files of the export that is there."""
    if not target.exists():
        return frozenset()
    if not target.is_dir():
        raise FileError(f"cannot write to {target}: it is a file; name a folder")
    if not any(target.iterdir()):
        return frozenset()
    try:
        files = json.loads((target / MARKER).read_text(encoding="utf-8"))["files"]
        written = frozenset(str(name) for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        raise FileError(f"{target} has files that no export wrote: name a new folder, or an empty one") from None
    if not overwrite:
        raise FileError(f"{target} is an earlier export: write --overwrite to replace its files, or name a new folder")
    return written | {MARKER}


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.previous")


def _recover(target: Path) -> None:
    """Gives the earlier export its name again, where a process was killed between the two renames that replace it."""
    previous = _previous(target)
    if not target.exists() and (previous / MARKER).exists():
        previous.rename(target)


def _put_in_place(part: Path, target: Path, written: frozenset[str]) -> None:
    if not target.exists() or not any(target.iterdir()):
        part.replace(target)
        sync_folder(target.parent)
        return
    for path in sorted(target.rglob("*")):
        name = str(path.relative_to(target))
        if path.is_file() and name not in written and "__pycache__" not in path.parts:
            beside = part / name
            if beside.exists():
                raise FileError(f"{path} is in the way, and no export wrote it: move it, or name a new folder")
            beside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, beside)
    previous = _previous(target)
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)  # whole under this name, should the process end before the next line
    part.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)
