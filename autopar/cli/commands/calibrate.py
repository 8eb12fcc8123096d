"""``autopar calibrate``: measures this machine, as ``local:N`` or into a cluster file that ``--cluster`` reads. Under torchrun,
on any number of nodes, each rank that it has started measures, and rank 0 writes."""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.console import Console, seconds, size
from autopar.cli.output import end_process
from autopar.errors import ClusterError
from autopar.files import check_target, write_whole

if TYPE_CHECKING:
    from autopar.cost_models.calibrate.fit import Calibration
    from autopar.cost_models.calibrate.joined_ranks import JoinedRank
    from autopar.machine_report.report import MachineReport


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, writes the file, shows what was found."""
    from autopar.cost_models.calibrate.local_cluster import measure_local
    from autopar.cost_models.calibrate.measure import thorough_effort
    from autopar.runtime.progress import working

    path = Path(arguments.output) if arguments.output else None
    if path is not None and path.suffix not in (".yaml", ".yml"):
        raise ClusterError(f"{path} would not be read as a cluster: give it a name that ends in .yaml")
    here = _launched()
    if here is not None:
        if arguments.report:
            raise ClusterError("--report is of one machine: run it without torchrun")
        if arguments.processes:
            raise ClusterError("--processes is for one machine: under torchrun --nproc-per-node says how many ranks a node has")
        if path is None:
            raise ClusterError("a cluster of several nodes needs a file: write -o cluster.yaml")
        return _joined(here, path, arguments.levels, console)
    if arguments.levels:
        raise ClusterError("--levels needs ranks on several nodes: torchrun --nnodes N ... -m autopar calibrate")
    if path is not None:
        check_target(path)
    processes = arguments.processes or devices()
    if arguments.report:
        return _report(arguments, processes, path, console)
    start = time.monotonic()
    console.progress(f"measuring {processes} process{'es' if processes > 1 else ''} of this machine, under a minute")
    with working("measuring", 1.0, console.progress):
        found = measure_local(processes, thorough_effort())
    if path is not None:
        _write(found, path, time.monotonic() - start, console)
    else:
        _keep(found, processes, console)
    return 0


def _report(arguments: argparse.Namespace, processes: int, path: Path | None, console: Console) -> int:
    """Calibrates, runs the models, writes the report. Exit status 1 where something failed or differs."""
    from autopar.cost_models.calibrate.fit import calibration_document
    from autopar.cost_models.calibrate.local_cluster import measure_local
    from autopar.cost_models.calibrate.measure import thorough_effort
    from autopar.machine_report.report import calibrated, planned_cases, with_cases

    target, found, document, failure = Path(arguments.report), None, None, ""
    check_target(target)
    console.progress(f"measuring {processes} process{'es' if processes > 1 else ''} of this machine, then models")
    try:
        found = measure_local(processes, thorough_effort(), _quiet)
        document = calibration_document(found, {"measured": date.today().isoformat()})
        if path is not None:
            _write_cluster(document, path)
    except Exception as error:  # of any kind: the rest goes on, since whoever lends a device may have one try
        failure = f"{type(error).__name__}: {error}"
    gpus, device = _device(found)

    def keep(so_far: MachineReport) -> None:
        write_whole(target, json.dumps(so_far.document(), indent=1))

    report = calibrated(device, processes, found, document, failure)
    keep(report)
    report = with_cases(report, planned_cases(gpus, device, found), 60 * arguments.minutes, console.progress, keep)
    _show_report(report, target, console)
    return int(bool(report.failures) or any(each.get("passed") is False for each in report.cases))


def _quiet(what: str, share: float) -> None:
    """Say nothing of the progress of a measurement."""


def _device(found: Calibration | None) -> tuple[int, str]:
    """Return the number of GPUs, and the driver's name of a device (of a CPU: as a calibration calls a process)."""
    import torch

    gpus = torch.cuda.device_count()
    if found is not None:
        return gpus, str(found.run.facts["name"])
    return gpus, torch.cuda.get_device_name() if gpus else "CPU process"


def _show_report(report: MachineReport, target: Path, console: Console) -> None:
    from autopar.machine_report.report import step_rows, verify_rows

    rows = [(each["name"], each["unit"], *_figures(each["ours"], each["measured"])) for each in report.constants]
    console.table(f"{report.device}: our constants", ("constant", "unit", "ours", "measured", "ratio"), rows)
    steps = [(name, part, *_figures(ours, measured)) for name, part, ours, measured in step_rows(report.cases)]
    console.table("Steps of one rank, seconds and bytes", ("step", "part", "predicted", "measured", "ratio"), steps)
    proofs = [(name, verdict, f"{worst:.2e}", f"{allowed:.1e}") for name, verdict, worst, allowed in verify_rows(report.cases)]
    console.table("Gradients beside one process", ("model", "", "largest difference", "allowed"), proofs)
    for line in report.failures:
        console.text(f"failed: {line}")
    if left := sum("left_out" in each for each in report.cases):
        console.text(f"{left} left out, since the minutes were spent")
    console.text(f"written to {target}, with everything that constants need")
    console.document({"file": str(target), **report.document()})


def _figures(ours: float | None, measured: float | None) -> list[str]:
    ratio = measured / ours if ours and measured is not None else None
    return ["-" if value is None else f"{value:.4g}" for value in (ours, measured, ratio)]


def _keep(found: Calibration, processes: int, console: Console) -> None:
    """Keep the cluster as what ``local:N`` means on this machine."""
    from autopar.cost_models.calibrate.local_cluster import keep_local
    from autopar.plan_inputs import cache_folder

    folder = cache_folder()
    if folder is None:
        raise ClusterError("you have no home where measurements are kept: write -o cluster.yaml")
    path = keep_local(processes, found, folder)
    _say_unreliable(found, console)
    _show(found, path, f"local:{processes}", console)


def _write_cluster(document: dict[str, Any], path: Path) -> None:
    import yaml

    write_whole(path, yaml.safe_dump(document, sort_keys=False, width=128))


def _write(found: Calibration, path: Path, elapsed: float, console: Console) -> None:
    from autopar.cost_models.calibrate.fit import calibration_document
    from autopar.cost_models.calibrate.measure import machine_name

    source = {"measured": f"{machine_name()}, {date.today().isoformat()}, {elapsed:.0f} s"}
    _write_cluster(calibration_document(found, source), path)
    _say_unreliable(found, console)
    _show(found, path, str(path), console)


def _say_unreliable(found: Calibration, console: Console) -> None:
    from autopar.cost_models.calibrate.fit import is_reliable

    if not is_reliable(found.run):
        console.progress(f"{found.cluster.note} (things took {found.run.slowdown:.1f} times as long as their own processor time)")


def _launched() -> JoinedRank | None:
    """Return torchrun's description of this process, where it started several; ClusterError where its numbers are none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    told = [os.environ.get(name, "") for name in names]
    if not told[0] or not told[1]:
        return None
    from autopar.cost_models.calibrate.joined_ranks import JoinedRank

    try:
        here = JoinedRank(*map(int, told))
    except ValueError:
        said = ", ".join(f"{name}={value!r}" for name, value in zip(names, told, strict=True))
        raise ClusterError(
            f"calibrate under a launcher needs RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; found {said}"
        ) from None
    return here if here.size > 1 else None


def _joined(here: JoinedRank, path: Path, levels: tuple[int, ...], console: Console) -> int:
    """Measures as one of the ranks; rank 0 writes."""
    from autopar.cost_models.calibrate.fit_levels import fit_levels
    from autopar.cost_models.calibrate.joined_ranks import check_levels, measure_joined
    from autopar.cost_models.calibrate.measure import thorough_effort
    from autopar.runtime.progress import tell, working

    wanted = check_levels(levels or (here.local_size,), here.size)
    start = time.monotonic()
    if here.rank == 0:
        check_target(path)
        console.progress(f"measuring {here.size} ranks on {here.size // here.local_size} nodes, for a minute or two")
    with working("measuring", 1.0, console.progress):
        found = measure_joined(here, wanted, thorough_effort(), tell)
    if found is not None:
        _write(fit_levels(found, date.today().isoformat()), path, time.monotonic() - start, console)
    end_process(0)


def devices() -> int:
    """GPUs of this machine, else four processes (``local:4``), or as many as there are cores where these are fewer than four."""
    import torch

    from autopar.cost_models.calibrate.measure import available_cores

    return torch.cuda.device_count() or max(2, min(4, available_cores()))


def _show(found: Calibration, path: Path, name: str, console: Console) -> None:
    cluster, seen = found.cluster, found.run
    rows = [(each.name, f"{each.rate / 1e9:.4g} G/s", seconds(each.seconds)) for each in seen.operations]
    console.table(f"{cluster.device.name}: FLOPs or bytes per second", ("operation", "rate", "one call"), rows)
    collectives = [
        (each.name, size(each.work), seconds(each.seconds), seconds(each.seconds * ratio), f"{ratio - 1:+.0%}")
        for each, ratio in zip(seen.collectives, found.ratios, strict=True)
    ]
    if collectives:
        console.table("Collectives", ("collective", "bytes", "measured", "latency and bandwidth", "error"), collectives)
        console.text("plans are priced by the measured seconds, linear between the sizes; rows over all are predicted by them")
    console.text(f"measuring took {', '.join(f'{took:.0f} s for {what}' for what, took in seen.parts)}")
    console.text(found.cluster.note)
    console.text(f"written to {path}; plan with\n  autopar plan MODEL --cluster {name}")
    console.document({"file": str(path), "slowdown": seen.slowdown, "spread": seen.spread, "cluster": cluster.to_dict()})
