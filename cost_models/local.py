"""The machine at hand as a cluster: processes that share its cores (or one GPU each), joined by gloo (or NCCL)."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from autopar.cost_models.calibrate import Calibration, calibration, is_sure
from autopar.cost_models.hardware import Cluster, preset_path, read, scaled
from autopar.cost_models.measure import Effort, Progress, Seen, cores, machine, machine_memory_bytes, run_ranks, short
from autopar.errors import ClusterError

AGAIN_SECONDS = 600.0
"""How long a measurement that is not sure counts, at first; each further one doubles it."""

STALE_SECONDS = 30 * 86400.0
"""How long any measurement counts."""


def described(processes: int) -> Cluster:
    """`local:processes` from the bundled description; only the memory is this machine's, divided evenly."""
    one = read(preset_path("local"), "local")
    device = replace(one.device, memory_bytes=machine_memory_bytes() // processes)
    return replace(scaled(one, f"local:{processes}", processes), device=device)


def measure_local(processes: int, effort: Effort | None = None, progress: Progress | None = None) -> Calibration:
    """Measures now. ClusterError where that fails."""
    seen = run_ranks(processes, effort or short(), progress or (lambda what, share: None))
    return _calibrated(processes, seen)


def _calibrated(processes: int, seen: Seen) -> Calibration:
    return calibration(f"local:{processes}", processes, seen, date.today().isoformat())


def cached(processes: int, folder: Path) -> Cluster:
    """The measured cluster, from `folder` where it was measured before, on as many cores and with the same torch.

    A file that cannot be read, or is older than a month, is measured anew. One that is not sure (the machine was busy, or
    repetitions differ much) is measured again after a while, less often each time; of all these runs the fastest seconds of each
    thing count, so that the figures draw near those of an idle machine.
    """
    path = folder / f"local-{processes}-{machine()}-{cores()}-torch{version('torch')}.json"
    tries, seen = 0, None
    try:
        data = json.loads(path.read_text())
        age = time.time() - path.stat().st_mtime
        if age < STALE_SECONDS:
            tries, seen = int(data["tries"]), Seen.from_dict(data["seen"])
            if is_sure(seen) or age < AGAIN_SECONDS * 2 ** (tries - 1):
                return Cluster.from_dict(data["cluster"])
    except (OSError, ValueError, KeyError, TypeError, ClusterError):
        tries, seen = 0, None
    found = measure_local(processes)
    if seen is not None:
        found = _calibrated(processes, found.seen.faster(seen))
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    kept = {"tries": tries + 1, "seen": asdict(found.seen), "cluster": found.cluster.to_dict()}
    draft.write_text(json.dumps(kept, indent=1))
    draft.replace(path)
    return found.cluster
