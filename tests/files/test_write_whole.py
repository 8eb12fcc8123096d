"""Files are written whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from autopar.errors import FileError
from autopar.files import write_whole


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "one")
    path.chmod(0o640)
    write_whole(path, b"two")
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path) == ["plan.json"]


def test_a_link_keeps_leading_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("one")
    (tmp_path / "link.json").symlink_to("real.json")
    write_whole(tmp_path / "link.json", "two")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "two"


def test_what_was_there_outlasts_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("whole")

    def full(file: BinaryIO) -> None:
        file.write(b"ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match="No space left on device; what was there before is unchanged"):
        write_whole(path, full)
    assert path.read_text() == "whole" and os.listdir(tmp_path) == ["plan.json"]


def test_devices_are_written_into() -> None:
    write_whole("/dev/null", "gone")
    with pytest.raises(FileError, match="cannot write /dev/full: No space left on device"):
        write_whole("/dev/full", "x" * 10_000)
    assert Path("/dev/full").is_char_device() and Path("/dev/null").is_char_device()


WRITER = """
import sys
from autopar.files import write_whole
number = 0
print("ready", flush=True)
while True:
    number += 1
    write_whole(sys.argv[1], f"{number:08d}" * 50_000)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """kill -9 at moments of its own choosing: each time the file is one of the texts, all of it."""
    path = tmp_path / "plan.json"
    path.write_text("00000000" * 50_000)
    for moment in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.003 + 0.0171 * moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        text = path.read_text()
        assert len(text) == 400_000 and text == text[:8] * 50_000
