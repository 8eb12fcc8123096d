"""Files written whole or not at all: aside, synced, renamed. What was there before stays until the new one is complete.

And files of the user's read: whatever is wrong with one is an error of one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from autopar.errors import AutoparError, FileError
from autopar.runtime.checkpoint.folder_sync import sync_folder

PART = ".part"
"""The ending of the names of unfinished files."""


MOST_BYTES = 256 * 2**20
"""More than any file that autopar reads whole: a device without an end is refused."""


def _parts(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Yield up to `most` bytes and a part: one read of so many would take them in memory at once, however short the file is."""
    count = 0
    while count <= most and (part := file.read(2**20)):
        yield part
        count += len(part)


def read_bytes(path: str | Path, error: type[AutoparError], what: str, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file; `error`, one line, where it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = b"".join(_parts(file, most))
    except MemoryError:
        raise error(f"{what} {path} does not fit in this machine's memory: name another file") from None
    except (OSError, ValueError) as fault:  # ValueError: a zero byte in the name
        reason = getattr(fault, "strerror", None) or fault
        raise error(f"cannot read {what} {path}: {reason}: check the path and its permissions") from None
    if len(content) > most:
        raise error(f"{what} {path} is longer than {most} bytes: name another file")
    return content


def read_text(path: str | Path, error: type[AutoparError], what: str, most: int = MOST_BYTES) -> str:
    """Read a file of text in UTF-8."""
    try:
        return read_bytes(path, error, what, most).decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise error(f"{what} {path} is no text in UTF-8 ({fault.reason} at byte {fault.start}): name another file") from None


def read_json(path: str | Path, error: type[AutoparError], what: str, most: int = MOST_BYTES) -> Any:
    """Read a file of JSON."""
    text = read_text(path, error, what, most)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise error(f"{what} {path} is not JSON: {fault}") from None


def check_target(path: str | Path) -> None:
    """Raise FileError where no file can be written there, for what takes long before it writes."""
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise FileError(f"cannot write {path}: it is a folder; name a file in it")
        if not stat.S_ISDIR(target.parent.stat().st_mode):
            raise FileError(f"cannot write {path}: {target.parent} is a file; name a file in a folder")
        target.exists()
        if len(os.fsencode(target.name)) > 255:
            raise FileError(f"cannot write {str(path)[:80]}...: the name is too long")
    except FileNotFoundError:
        raise FileError(f"cannot write {path}: the folder {target.parent} does not exist; make it first") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write {str(path)[:200]}: {reason}; name another file") from None


def make_folder(path: str | Path) -> Path:
    """Make a folder where there is none, with those above it, and return its path. FileError, one line, where that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot make the folder {str(path)[:200]}: {reason}; name another one") from None
    return Path(path)


def write_whole(path: str | Path, content: str | bytes | Callable[[BinaryIO], None]) -> Path:
    """Write the file, and return its path; `content` may write itself into an open file. A link keeps leading to its target; what
    is no regular file (``/dev/stdout``) is written into. FileError, one line, where it cannot be written."""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            with target.open("wb") as file:
                _fill(file, content)
        else:
            _replace(target, content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write {path}: {reason}; what was there before is unchanged") from None
    return target


def _replace(target: Path, content: str | bytes | Callable[[BinaryIO], None]) -> None:
    part = part_of(target)
    remove_left_over(target)
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


def part_of(target: Path) -> Path:
    """Return the name of the unfinished file or folder beside the target; it names the process that writes it."""
    return target.with_name(f".{target.name[:100]}.{_host()}.{os.getpid()}{PART}")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:60] or "host"


def remove_left_over(target: Path) -> None:
    """Remove what processes of this machine left unfinished beside the target when they were killed."""
    start = f".{target.name[:100]}.{_host()}."
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            number = path.name.removeprefix(start).removesuffix(PART)
            if path.name == f"{start}{number}{PART}" and number.isascii() and number.isdigit() and not _is_running(int(number)):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
