"""``autopar calibrate``: measures this machine and writes a cluster file that ``--cluster`` reads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from autopar.cli.output import Output, seconds, size
from autopar.errors import ClusterError

if TYPE_CHECKING:
    from autopar.cost_models.calibrate import Calibration


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measures, writes the file, shows what was found."""
    import yaml

    from autopar.cost_models.calibrate import document, is_sure
    from autopar.cost_models.local import measure_local
    from autopar.cost_models.measure import machine, thorough

    path = Path(arguments.output)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(f"{path} would not be read as a cluster: give it a name that ends in .yaml")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ClusterError(f"cannot write {path}: it is a folder, or is in none; name a file in a folder that exists")
    processes = arguments.processes or devices()
    start = time.monotonic()
    output.progress(f"measuring {processes} process{'es' if processes > 1 else ''} of this machine, under a minute")
    with _bar(output) as progress:
        found = measure_local(processes, thorough(), progress)
    source = {"measured": f"{machine()}, {date.today().isoformat()}, {time.monotonic() - start:.0f} s"}
    path.write_text(yaml.safe_dump(document(found, source), sort_keys=False, width=128))
    if not is_sure(found.seen):
        output.progress(f"{found.cluster.note} (things took {found.seen.busy:.1f} times as long as their own processor time)")
    _show(found, path, output)
    return 0


def devices() -> int:
    """GPUs of this machine, else four processes (``local:4``), or as many as there are cores where these are fewer than four."""
    import torch

    from autopar.cost_models.measure import cores

    return torch.cuda.device_count() or max(2, min(4, cores()))


@contextmanager
def _bar(output: Output) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, else lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, share: output.progress(what)
        return
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, share: shown.update(task, completed=share, description=what)


def _show(found: Calibration, path: Path, output: Output) -> None:
    cluster, seen = found.cluster, found.seen
    rows = [(each.name, f"{each.rate / 1e9:.4g} G/s", seconds(each.seconds)) for each in seen.operations]
    output.table(f"{cluster.device.name}: FLOPs or bytes per second", ("operation", "rate", "one call"), rows)
    ways = [
        (each.name, size(each.work), seconds(each.seconds), seconds(each.seconds * ratio), f"{ratio - 1:+.0%}")
        for each, ratio in zip(seen.collectives, found.ratios, strict=True)
    ]
    if ways:
        output.table("Collectives", ("kind", "bytes", "measured", "by the fitted link", "off"), ways)
    output.text(found.cluster.note)
    output.text(f"written to {path}; plan with\n  autopar plan MODEL --cluster {path}")
    output.document({"file": str(path), "busy": seen.busy, "spread": seen.spread, "cluster": cluster.to_dict()})
