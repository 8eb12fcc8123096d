"""Full disks, and kill -9 at any moment of `plan -o`, `export` and cache writing: what was there is whole, or what is new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzzing.one_line import answer

from autopar.ir.plan_file.plan_file import decode_plan, load_plan
from autopar.program.export import MARKER

KILLER = """
import builtins, io, json, os, shutil, signal, sys
from pathlib import Path

# At the n-th time that a file is opened for writing, written, synced, renamed or removed below the folder, the process ends by
# kill -9, or the disk is full from then on. One process for each moment, forked from this one, in a copy of `start`.
mode, start, work, moments, words = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:]
moment, seen, folder = 0, 0, ""

def step(name, path):
    global seen
    if not folder or not isinstance(path, (str, bytes, os.PathLike)) or folder not in os.fsdecode(path):
        return
    seen += 1
    if seen == moment and mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if seen >= moment and mode == "full" and name in ("open", "write", "fsync", "mkdir"):
        raise OSError(28, "No space left on device")

def wrapped(name):
    before = getattr(os, name)
    def call(*args, **kwargs):
        step(name, args[0] if args else "")
        result = before(*args, **kwargs)
        step("after", args[0] if args else "")
        return result
    setattr(os, name, call)

class File(io.BufferedWriter):
    def write(self, data):
        half = len(data) // 2
        super().write(data[:half])
        super().flush()
        step("write", folder)
        return half + super().write(data[half:])

def opened(path, mode="r", *args, **kwargs):
    if "w" in mode and isinstance(path, (str, os.PathLike)) and folder and folder in os.fspath(path):
        step("open", path)
        if "b" in mode:
            return File(io.FileIO(path, "w"))
    return before_open(path, mode, *args, **kwargs)

before_open, fsync = io.open, os.fsync
from autopar.cli import main
import torch, autopar.planning, autopar.program.export, autopar.passes.lower, autopar.cli.commands.plan
io.open = builtins.open = opened
for name in ("replace", "rename", "mkdir", "unlink", "rmdir", "chmod"):
    wrapped(name)

def synced(number):
    step("fsync", folder)
    return fsync(number)

os.fsync = synced

def run(place):
    global folder
    os.environ["HOME"] = str(place / "home")
    out = os.open(work / f"{place.name}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    folder = str(place)
    status = 1
    try:
        status = main([word.replace("FOLDER", str(place)) for word in words])
    except BaseException:
        import traceback
        traceback.print_exc()
    folder = ""
    if moment >= 10**9:
        (work / "steps").write_text(str(seen))
    sys.stdout.flush()
    os._exit(status)

results = {}
for moment in moments:
    place = work / f"at{moment}"
    shutil.copytree(start, place, symlinks=True)
    for again in (False, True):
        child = os.fork()
        if child == 0:
            moment = 10**9 + 1 if again else moment
            run(place)
        status = os.waitpid(child, 0)[1]
        results.setdefault(moment, []).append(os.waitstatus_to_exitcode(status))
        if not again:
            shutil.copytree(place, work / f"after{moment}", symlinks=True)
print(json.dumps(results))
"""


def run(mode: str, start: Path, work: Path, moments: list[int], *words: object) -> dict[int, list[int]]:
    """By moment: the exit status of the command, and of the next one in the same place. ``work/after7`` is how the first left it,
    ``work/at7`` how the second did."""
    work.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-c", KILLER, mode, str(start), str(work), json.dumps(moments), *map(str, words)]
    said = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert said.returncode == 0, said
    return {int(moment): status for moment, status in json.loads(said.stdout).items()}


def all_moments(mode: str, start: Path, work: Path, most: int, *words: object) -> dict[int, list[int]]:
    """At most so many moments, the first and the last among them."""
    run(mode, start, work, [10**9], *words)
    count = int((work / "steps").read_text())
    assert count >= 8
    return run(mode, start, work, sorted({1 + round(n * (count - 1) / max(1, most - 1)) for n in range(most)}), *words)


PLANNING = ("mlp", "--cluster", "dgx-h100:1", "--batch", 32)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two different plans."""
    folder = tmp_path_factory.mktemp("killed")
    for name, force in (("old", "dp=8,zero=0"), ("new", "dp=8,zero=3")):
        said = answer("plan", *PLANNING, "--force", force, "--no-cache", "-o", folder / f"{name}.json")
        assert said.status == 0, said
    return folder / "old.json", folder / "new.json"


def zero_of(path: Path) -> int:
    return load_plan(path).document.parallelism.zero


def strays(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.name.endswith(".part")]


def check_statuses(mode: str, found: dict[int, list[int]], work: Path) -> None:
    """Killed, or one line; the next command is done."""
    for moment, (first, second) in found.items():
        said = (work / f"at{moment}.txt").read_text()
        assert first in ((-9,) if mode == "kill" else (0, 2)) and second == 0, (moment, first, second, said)
        assert "Traceback" not in said, (moment, said)


def check_plan(mode: str, plans: tuple[Path, Path], folder: Path, most: int) -> None:
    """`plan -o` over an earlier plan, with the cache of plans."""
    (folder / "start" / "home" / ".cache" / "autopar" / "plans").mkdir(parents=True)
    (folder / "start" / "plan.json").write_bytes(plans[0].read_bytes())
    words = ("plan", *PLANNING, "--force", "dp=8,zero=3", "-o", "FOLDER/plan.json")
    found = all_moments(mode, folder / "start", folder / "work", most, *words)
    check_statuses(mode, found, folder / "work")
    for moment, (status, _) in found.items():
        after, then = folder / "work" / f"after{moment}", folder / "work" / f"at{moment}"
        assert zero_of(after / "plan.json") in ((0, 3) if mode == "kill" else (0,) if status == 2 else (3,)), moment
        for cached in [*after.rglob("plans/*.json"), *then.rglob("plans/*.json")]:
            decode_plan(json.dumps(json.loads(cached.read_text())["plan"]), str(cached))
        assert mode == "kill" or not strays(after), moment
        assert zero_of(then / "plan.json") == 3 and not strays(then / "plan.json"), moment
        assert [path.name for path in then.iterdir() if path.name != "home"] == ["plan.json"], "the next run tidies up"


def check_export(mode: str, plans: tuple[Path, Path], folder: Path, most: int) -> None:
    """`export --overwrite` over an earlier export, beside a file of the user's."""
    target = folder / "start" / "out"
    assert answer("export", plans[0], target).status == 0
    (target / "mine.txt").write_text("mine")
    found = all_moments(mode, folder / "start", folder / "work", most, "export", plans[1], "FOLDER/out", "--overwrite")
    check_statuses(mode, found, folder / "work")
    for moment, (status, _) in found.items():
        after, then = folder / "work" / f"after{moment}", folder / "work" / f"at{moment}"
        places = [path for path in (after / "out", after / ".out.previous") if (path / MARKER).exists()]
        assert places, moment  # between two renames the earlier export is whole under the other name
        check_whole(places[0], (0, 3) if mode == "kill" else (0,) if status == 2 else (3,))
        check_whole(then / "out", (3,))
        assert [path.name for path in then.iterdir()] == ["out"], "nothing is left over"


def check_whole(place: Path, zeros: tuple[int, ...]) -> None:
    """An export with all of its files, of one plan, and with the user's own."""
    listed = json.loads((place / MARKER).read_text())["files"]
    assert all((place / name).exists() for name in listed)
    assert (place / "mine.txt").read_text() == "mine"
    zero = zero_of(place / "plan.json")
    assert zero in zeros and f"ZeRO {zero}" in (place / "program.py").read_text()


def test_plan_at_three_moments(plans: tuple[Path, Path], tmp_path: Path) -> None:
    check_plan("kill", plans, tmp_path, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kill", "full"])
def test_plan_at_twenty_moments(mode: str, plans: tuple[Path, Path], tmp_path: Path) -> None:
    check_plan(mode, plans, tmp_path, most=20)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kill", "full"])
def test_export_at_twenty_moments(mode: str, plans: tuple[Path, Path], tmp_path: Path) -> None:
    check_export(mode, plans, tmp_path, most=20)


def test_a_full_device() -> None:
    said = answer("plan", *PLANNING, "--force", "dp=8,zero=0", "--no-cache", "-o", "/dev/full")
    assert said.status == 2 and said.is_one_line and "No space left on device" in said.err
