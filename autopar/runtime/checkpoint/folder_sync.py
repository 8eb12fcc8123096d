"""Folders whose names outlast a loss of power. Needs the standard library alone: the command line reads it without torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames inside of it outlast a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
