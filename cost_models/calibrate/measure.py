"""The measurement of this machine: one process per rank, all of which measure at once, as in training; their timings are merged.

Each operation and collective is timed in short slices, one slice per round, so that a disturbance affects one round of
everything and not every round of one operation; of the rounds of an operation a fast one counts (`QUANTILE`), of a collective,
which waits for the slowest rank in every step too, the median. Every slice starts on all ranks
together, since they share memory and perhaps cores (then collectives are timed between products: `RankBenchmark.between`).
On a CPU an operation's seconds are its processor time, times the ranks over the cores that they share: other programs do not
count. Shared cores are never shared evenly, and steps wait for the rank that has least of them: by how much longer than the mean
its clock runs (median over everything) is part of an operation's seconds. A collective also waits: its seconds are wall-clock
seconds divided by the slowdown of the operations (`CalibrationRun.slowdown`), and at least the processor time of all ranks over
the cores.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

from autopar.errors import ClusterError

QUANTILE = 0.25
TIME_LIMIT_SECONDS = 300.0
QUICK_SECONDS = 10.0
LARGE_BYTES = 2**21
"""The bytes from which on a collective is bound by bandwidth."""

PACKED_MATRICES, PACKED_ROWS, PACKED = 4, 16, 2048
"""Products of few rows by square weights, which are packed for as long as the arithmetic takes, and are more than caches hold."""

WIRE_BYTES = 2**17
"""The bytes from which on a collective over a link between machines is bound by that link."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a measurement: at most `rounds` slices of `slice_seconds` of each operation and collective, and whether of
    many shapes and sizes. All operations, and all collectives of one level, take about `limit_seconds`, of which each has an
    equal part: what takes long has fewer calls and rounds, but one at least. With `total_seconds` everything, with the start of
    the processes, takes about so long at most (0: as long as it takes)."""

    rounds: int
    slice_seconds: float
    thorough: bool
    limit_seconds: float
    total_seconds: float = 0.0


def quick_effort() -> Effort:
    """Return an effort of at most `QUICK_SECONDS`: for ``local:N`` on first use, where a user waits."""
    return Effort(rounds=5, slice_seconds=0.03, thorough=False, limit_seconds=6.0, total_seconds=QUICK_SECONDS)


def thorough_effort() -> Effort:
    """Return an effort of under a minute, for `autopar calibrate`."""
    return Effort(rounds=8, slice_seconds=0.06, thorough=True, limit_seconds=20.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call. `work` is FLOPs or bytes. `width`: of a collective in groups of so many neighbours at once (0: among
    all ranks)."""

    name: str
    work: float
    seconds: float
    width: int = 0

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """Timings of one calibration, merged over ranks.

    facts: of rank 0's device.
    operations, collectives: their timings (of a collective: name is its kind, work its bytes).
    slowdown: how many times longer operations took than on an idle machine.
    spread: by which share the median round took longer than the one that counts, for the median operation.
    contention: share of the cores that a large collective uses, which compute that overlaps with it lacks.
    parts: what was measured, and how many seconds that took.
    narrower: collectives of groups, which are as wide as a mesh axis may be.
    """

    facts: dict[str, Any]
    operations: tuple[Timing, ...]
    collectives: tuple[Timing, ...]
    slowdown: float
    spread: float = 0.0
    contention: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()
    narrower: tuple[Timing, ...] = ()

    @property
    def everything(self) -> tuple[Timing, ...]:
        """Operations and collectives."""
        return self.operations + self.collectives

    def faster(self, other: CalibrationRun) -> CalibrationRun:
        """Return the faster seconds of each timing: only a disturbance makes a run slower. This run where the two differ."""
        if [(each.name, each.work) for each in self.everything] != [(each.name, each.work) for each in other.everything]:
            return self
        pairs = [
            tuple(replace(a, seconds=min(a.seconds, b.seconds)) for a, b in zip(timings, others, strict=True))
            for timings, others in ((self.operations, other.operations), (self.collectives, other.collectives))
        ]
        slowdown, spread, contention = map(min, _quality(self), _quality(other))
        return CalibrationRun(self.facts, pairs[0], pairs[1], slowdown, spread, contention, self.parts, self.narrower)


@dataclass(frozen=True, slots=True)
class LevelRuns:
    """The measurements of several levels: for each level (how many devices it joins) the collectives among neighbours on it, and
    those of all ranks together."""

    levels: tuple[tuple[int, CalibrationRun], ...]
    whole: CalibrationRun
    nodes: int


Progress = Callable[[str, float], object]
"""Called with what is measured, and which share is done."""


def measure_ranks(processes: int, effort: Effort, progress: Progress) -> CalibrationRun:
    """Start `processes` processes and merge their timings. ClusterError where one fails or all take too long."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps({"size": processes, "folder": folder, "began": time.time(), **asdict(effort)})
        code = "import sys; from autopar.cost_models.calibrate.measure_rank import fork_ranks; fork_ranks(sys.argv[1])"
        parent = subprocess.Popen(
            [sys.executable, "-c", code, job],
            stdout=subprocess.PIPE,
            stderr=(Path(folder) / "parent.err").open("wb"),
            text=True,
            start_new_session=True,
        )
        late: list[bool] = []
        timer = Timer(TIME_LIMIT_SECONDS, _kill, (parent, late))
        timer.start()
        try:
            for line in parent.stdout or ():
                share, _, what = line.rstrip().partition(" ")
                progress(what, float(share))
            parent.wait()
        finally:
            timer.cancel()
            _kill(parent, [])
        if late:
            took = f"measuring {processes} processes took over {TIME_LIMIT_SECONDS:.0f} s"
            raise ClusterError(f"{took}: end what else runs on this machine, or take fewer processes")
        if parent.returncode:
            failed = next((f"{rank}" for rank in range(processes) if (Path(folder) / f"{rank}.failed").exists()), "parent")
            text = (Path(folder) / f"{failed}.err").read_text(errors="replace").strip()
            why = (text.splitlines() or ["no message"])[-1]
            raise ClusterError(f"measuring {processes} processes failed ({why}): describe the machine in a .yaml file instead")
        each = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    return merge_ranks(each)


def _kill(parent: subprocess.Popen[str], late: list[bool]) -> None:
    """End the parent and the ranks that it forked, which are its session, where it still runs."""
    if parent.poll() is None:
        late.append(True)
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def merge_ranks(each: list[dict[str, Any]], wire: bool = False) -> CalibrationRun:
    """Merge the rounds of all ranks: on shared cores by their mean, on devices of their own by the slowest. Over a `wire` between
    machines only the processor time of a collective is longer on a busy machine, and not what it waits for; that of a large one
    passes while the wire is busy. Groups that share a wire get uneven parts of it, and the ones that end late had it alone at
    last, so that only the slowest rank's seconds are those of all bytes over the wire's rate."""
    facts = each[0]["facts"]
    merge = _mean if facts["kind"] == "cpu" else max
    facts["memory_bytes"] = min(one["facts"]["memory_bytes"] for one in each)
    facts["base_bytes"] = max(one["facts"]["base_bytes"] for one in each)

    def rounds(kind: str, index: int, which: str) -> list[float]:
        merge_round = max if wire and (kind, which) == ("collectives", "clock") else merge
        return [merge_round(same) for same in zip(*(one[kind][index][which] for one in each), strict=True)]

    counts = {kind: range(len(each[0][kind])) for kind in ("operations", "collectives")}
    own = {(kind, index): rounds(kind, index, "own") for kind in counts for index in counts[kind]}
    clock = {(kind, index): rounds(kind, index, "clock") for kind in counts for index in counts[kind]}
    slowdown = max(1.0, median(sum(clock["operations", i]) / sum(own["operations", i]) for i in counts["operations"]))
    skew = 1.0
    if facts.get("ranks_per_core", 1.0) > 1:
        pairs = [zip(*(one["operations"][i]["clock"] for one in each), strict=True) for i in counts["operations"]]
        skew = median(max(same) / _mean(same) for rounds_of in pairs for same in rounds_of)
    operations, collectives = [], []
    for index, item in enumerate(each[0]["operations"]):
        operations.append(Timing(item["name"], item["work"], skew * quantile(own["operations", index])))
    for index, item in enumerate(each[0]["collectives"]):
        used, passed = median(own["collectives", index]), median(clock["collectives", index])
        waiting = (slowdown - 1) * used if item["work"] < WIRE_BYTES else 0.0
        seconds = max(used, passed / slowdown, passed - waiting if wire else 0.0)
        collectives.append(Timing(item["name"], item["work"], seconds, item.get("width", 0)))
    spread = median(median(same) / quantile(same) for same in own.values()) - 1
    large = [each.work >= LARGE_BYTES and not each.width for each in collectives]
    uses = [quantile(own["collectives", i]) / collectives[i].seconds for i, counts in enumerate(large) if counts]
    contention = median(uses) if uses and facts["kind"] == "cpu" else 0.0
    return CalibrationRun(
        facts=facts,
        operations=tuple(operations),
        collectives=tuple(each for each in collectives if not each.width),
        narrower=tuple(each for each in collectives if each.width),
        slowdown=slowdown,
        spread=spread,
        contention=contention,
        parts=tuple((str(what), float(seconds)) for what, seconds in each[0].get("parts", ())),
    )


def _quality(run: CalibrationRun) -> tuple[float, float, float]:
    return run.slowdown, run.spread, run.contention


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def quantile(rounds: list[float]) -> float:
    """Return the `QUANTILE` of the rounds."""
    return sorted(rounds)[int(QUANTILE * (len(rounds) - 1))]


def machine_name() -> str:
    """Return this machine's name."""
    return platform.node() or "machine"


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
