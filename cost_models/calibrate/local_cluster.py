"""This machine as a cluster ``local:N`` of processes that share its cores (or have one GPU each), with gloo (or NCCL)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import msgspec

from autopar.cost_models.calibrate.fit import Calibration, fit_cluster, is_reliable
from autopar.cost_models.calibrate.measure import (
    QUICK_SECONDS,
    CalibrationRun,
    Effort,
    Progress,
    available_cores,
    machine_memory_bytes,
    machine_name,
    measure_ranks,
    quick_effort,
)
from autopar.cost_models.hardware.cluster import Cluster, read_cluster, with_nodes
from autopar.cost_models.hardware.cluster_file import preset_path
from autopar.errors import ClusterError, FileError
from autopar.files import read_json, write_whole
from autopar.runtime.progress import tell, working

RETRY_SECONDS = 600.0
"""The seconds for which an unreliable measurement is used, at first; each further one doubles it."""

THOROUGH_TRIES = 10

MOST_MEASURED = 64
"""Processes that are started to be measured; larger numbers take the bundled description."""

_MEASURED_HOW = 3
"""Goes up when timings mean something else: 2 since collectives are timed between products, 3 with tables by message size."""

STALE_SECONDS = 30 * 86400.0
"""The seconds for which any measurement is used."""


def default_local_cluster(processes: int) -> Cluster:
    """Return `local:processes` from the bundled description; only the memory is this machine's, divided evenly."""
    one = read_cluster(preset_path("local"), "local")
    device = replace(one.device, memory_bytes=machine_memory_bytes() // processes)
    return replace(with_nodes(one, f"local:{processes}", processes), device=device)


def measure_local(processes: int, effort: Effort | None = None, progress: Progress | None = None) -> Calibration:
    """Measure now. ClusterError where that fails."""
    run = measure_ranks(processes, effort or quick_effort(), progress or tell)
    return _calibrated(processes, run)


def _calibrated(processes: int, run: CalibrationRun) -> Calibration:
    return fit_cluster(f"local:{processes}", processes, run, date.today().isoformat())


def measured_local_cluster(processes: int, folder: Path, say: Callable[[str], object] = lambda line: None) -> Cluster:
    """Return the measured cluster, cached in `folder` per number of cores and torch version.

    A file that cannot be read, or is older than a month, is replaced by a new measurement. An unreliable one (the machine was
    busy, or repetitions differ much) is measured again after a while, less often each time; of all these runs the fastest seconds
    of each timing count, so that the figures converge to those of an idle machine. `say` gets a line before it is measured, which
    tells how long that takes, and one after.
    """
    if processes > MOST_MEASURED:
        return default_local_cluster(processes)
    path = _path(processes, folder)
    tries, run = 0, None
    try:
        data = read_json(path, ClusterError, "the measurement")
        age = time.time() - path.stat().st_mtime
        if age < STALE_SECONDS:
            tries, run = int(data["tries"]), msgspec.convert(data["run"], CalibrationRun)
            if is_reliable(run) or age < RETRY_SECONDS * 2 ** (tries - 1):
                return Cluster.from_dict(data["cluster"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, ClusterError):
        tries, run = 0, None
    began = time.monotonic()
    often = "once" if run is None else "again, since other processes had disturbed the last measurement"
    longer = "`autopar calibrate` measures longer"
    say(f"measuring this machine as local:{processes}, about {QUICK_SECONDS:.0f} s, {often} ({longer})")
    with working("measuring this machine", 1.0):
        calibration = measure_local(processes)
    say(f"measured in {time.monotonic() - began:.0f} s, kept in {path}")
    if run is not None:
        calibration = _calibrated(processes, calibration.run.faster(run))
    _keep(calibration, tries + 1, path)
    return calibration.cluster


def keep_local(processes: int, calibration: Calibration, folder: Path) -> Path:
    """Keep a thorough measurement as that of ``local:processes``, and return its file. It counts as often repeated: a busy
    machine's quick ones do not replace it soon."""
    path = _path(processes, folder)
    _keep(calibration, THOROUGH_TRIES, path)
    return path


def _path(processes: int, folder: Path) -> Path:
    return folder / f"local{_MEASURED_HOW}-{processes}-{machine_name()}-{available_cores()}-torch{version('torch')}.json"


def _keep(calibration: Calibration, tries: int, path: Path) -> None:
    content = {"tries": tries, "run": asdict(calibration.run), "cluster": calibration.cluster.to_dict()}
    with suppress(OSError, FileError):  # a folder that cannot be written is no error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1))
