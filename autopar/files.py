"""Files written whole or not at all: aside, synced, renamed. What was there before stays until the new one is complete."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from autopar.errors import FileError

PART = ".part"
"""How the names of unfinished files end."""


def write_whole(path: str | Path, content: str | bytes | Callable[[BinaryIO], None]) -> Path:
    """Writes the file, and gives its path; `content` may write itself into an open file. A link keeps leading to its target; what
    is no regular file (``/dev/stdout``) is written into. FileError, one line, where it cannot be written."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            with target.open("wb") as file:
                _fill(file, content)
        else:
            _replace(target, content)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}; what was there before is unchanged") from None
    return target


def _replace(target: Path, content: str | bytes | Callable[[BinaryIO], None]) -> None:
    part = target.with_name(f".{target.name[:100]}.{os.getpid()}{PART}")
    try:
        with part.open("wb") as file:
            _fill(file, content)
            os.fsync(file.fileno())
        if target.exists():
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _fill(file: BinaryIO, content: str | bytes | Callable[[BinaryIO], None]) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content.encode() if isinstance(content, str) else content)
    file.flush()


def sync_folder(folder: Path) -> None:
    """Renames inside of the folder outlast a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
