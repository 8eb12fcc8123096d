"""``autopar calibrate``: measures this machine and writes a cluster file that ``--cluster`` reads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import Progress, TimeElapsedColumn

from autopar.cli.console import Console, seconds, size
from autopar.errors import ClusterError
from autopar.files import check_target, write_whole

if TYPE_CHECKING:
    from autopar.cost_models.calibrate.fit import Calibration


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, writes the file, shows what was found."""
    import yaml

    from autopar.cost_models.calibrate.fit import calibration_document, is_reliable
    from autopar.cost_models.calibrate.local_cluster import measure_local
    from autopar.cost_models.calibrate.measure import machine_name, thorough_effort

    path = Path(arguments.output)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(f"{path} would not be read as a cluster: give it a name that ends in .yaml")
    check_target(path)
    processes = arguments.processes or devices()
    start = time.monotonic()
    console.progress(f"measuring {processes} process{'es' if processes > 1 else ''} of this machine, under a minute")
    with _bar(console) as progress:
        found = measure_local(processes, thorough_effort(), progress)
    source = {"measured": f"{machine_name()}, {date.today().isoformat()}, {time.monotonic() - start:.0f} s"}
    write_whole(path, yaml.safe_dump(calibration_document(found, source), sort_keys=False, width=128))
    if not is_reliable(found.run):
        console.progress(f"{found.cluster.note} (things took {found.run.slowdown:.1f} times as long as their own processor time)")
    _show(found, path, console)
    return 0


def devices() -> int:
    """GPUs of this machine, else four processes (``local:4``), or as many as there are cores where these are fewer than four."""
    import torch

    from autopar.cost_models.calibrate.measure import available_cores

    return torch.cuda.device_count() or max(2, min(4, available_cores()))


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, else lines."""
    terminal = RichConsole(stderr=True)
    if not terminal.is_terminal:
        yield lambda what, share: console.progress(what)
        return
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=terminal, transient=True) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, share: shown.update(task, completed=share, description=what)


def _show(found: Calibration, path: Path, console: Console) -> None:
    cluster, seen = found.cluster, found.run
    rows = [(each.name, f"{each.rate / 1e9:.4g} G/s", seconds(each.seconds)) for each in seen.operations]
    console.table(f"{cluster.device.name}: FLOPs or bytes per second", ("operation", "rate", "one call"), rows)
    collectives = [
        (each.name, size(each.work), seconds(each.seconds), seconds(each.seconds * ratio), f"{ratio - 1:+.0%}")
        for each, ratio in zip(seen.collectives, found.ratios, strict=True)
    ]
    if collectives:
        console.table("Collectives", ("collective", "bytes", "measured", "fitted link", "error"), collectives)
    console.text(found.cluster.note)
    console.text(f"written to {path}; plan with\n  autopar plan MODEL --cluster {path}")
    console.document({"file": str(path), "slowdown": seen.slowdown, "spread": seen.spread, "cluster": cluster.to_dict()})
