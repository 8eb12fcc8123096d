"""The report of a machine: its cases run one after another, each in a process of its own; what fails is a line, and the rest goes
on. The file is written after each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.cost_models.calibrate.fit import Calibration, preset_of_device
from autopar.cost_models.calibrate.local_cluster import default_local_cluster
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster, preset_with_devices
from autopar.cost_models.hardware.device_specs import AxisLink, Device, Level
from autopar.machine_report.cases import Case, StepCase, cases, step_case, verify_case

CASE_LIMIT_SECONDS = 240.0
"""A case that takes longer hangs, and is ended."""

SCHEMA = 1

Say = Callable[[str], object]
Run = Callable[[Case], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What is known so far: the calibration as a cluster and as it ran (None: it failed), its constants beside ours, an entry for
    each case, and a line for all that failed."""

    device: str
    constants: tuple[dict[str, Any], ...]
    cluster: dict[str, Any] | None
    run: dict[str, Any] | None
    cases: tuple[dict[str, Any], ...] = ()
    failures: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON document. Its `cluster` is what `autopar calibrate -o` writes, and ``--cluster`` reads."""
        names = ("device", "constants", "cluster", "run", "cases", "failures")
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in names}}


def calibrated(
    device: str, size: int, found: Calibration | None, document: Mapping[str, Any] | None, failure: str
) -> MachineReport:
    """Return the report of `size` devices with the calibration alone; `failure` says why there is none."""
    ours = our_cluster(device, size)
    failures = [f"calibration: {failure}"] * bool(failure)
    if ours is None:
        instead = "predicted by what was measured" if found else "left out"
        failures.append(f"no preset describes a {device}: steps are {instead}, and no constant of ours stands beside it")
    rows = [] if found is None or ours is None else constants(ours, found)
    table = tuple({**asdict(each), "ratio": each.ratio} for each in rows)
    run = asdict(found.run) if found else None
    return MachineReport(device, table, dict(document) if document else None, run, failures=tuple(failures))


def planned_cases(gpus: int, device: str, found: Calibration | None) -> Iterator[Case]:
    """Yield the cases of a machine. Steps are predicted by our constants; by the calibration where no preset has the device."""
    for each in cases(gpus):
        if not isinstance(each, StepCase):
            yield verify_case(*each)
        elif cluster := _devices(device, each.devices, found):
            yield step_case(each, cluster.to_dict())


def _devices(device: str, size: int, found: Calibration | None) -> Cluster | None:
    ours = our_cluster(device, size)
    if ours is None and found is not None:  # collectives of a step move nothing: any links will do
        return replace(preset_with_devices("dgx-h100", size), device=found.cluster.device, host=found.cluster.host)
    return ours


def with_cases(
    report: MachineReport, listed: Iterable[Case], seconds: float, say: Say, keep: Callable[[MachineReport], object],
    run: Run | None = None,
) -> MachineReport:  # fmt: skip
    """Run the cases until `seconds` are spent: those that are left are entries that say so. `keep` gets the report after each."""
    began = time.monotonic()
    for case in listed:
        entry: dict[str, Any] = {"kind": case.kind, "name": case.name}
        if (spent := time.monotonic() - began) > seconds:
            entry["left_out"] = f"the budget of {seconds / 60:.3g} minutes was spent"
        else:
            say(f"{spent:4.0f} s: {case.kind} {case.name}")
            entry |= (run or run_case)(case)
        failures = report.failures
        if "failed" in entry:
            failures += (f"{case.kind} {case.name}: {entry['failed']}",)
            say(failures[-1])
        report = replace(report, cases=(*report.cases, entry), failures=failures)
        keep(report)
    return report


def run_case(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own, and return its document, or why it has none as ``failed``."""
    began = time.monotonic()
    pipe = subprocess.PIPE
    process = subprocess.Popen(case.command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=CASE_LIMIT_SECONDS)
        found: dict[str, Any] = json.loads(out)
        if "error" in found:
            found = {"failed": found["error"]["message"]}
    except subprocess.TimeoutExpired:
        found = {"failed": f"took over {CASE_LIMIT_SECONDS:.0f} s"}
    except (ValueError, TypeError):
        said = [line for line in err.splitlines() if line.strip()]
        found = {"failed": (said or ["no message"])[-1][:400], "said": "\n".join(said[-30:])}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return found | {"took_seconds": round(time.monotonic() - began, 1)}


def step_rows(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float | None, float | None]]:
    """Yield of each measured step the case, the part, what our constants predict, and what was measured."""
    for each in entries:
        for part in ("compute", "optimizer", "peak_bytes"):
            if "parts" in each:
                row = each["parts"][part]
                yield each["name"], part, row["predicted"], row["measured"]


def verify_rows(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Yield of each verified model the case, the verdict, the largest difference of its gradients, and what is allowed."""
    for each in entries:
        if each["kind"] == "verify" and "passed" in each:
            worst = each["gradients"]
            yield each["name"], "equal" if each["passed"] else "DIFFERENT", worst["worst"], worst["allowed"]


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure of the cost model in its `unit`, ours and as it was measured."""

    name: str
    unit: str
    ours: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Return measured over ours; None where ours is 0."""
        return self.measured / self.ours if self.ours else None


def our_cluster(device: str, size: int) -> Cluster | None:
    """Return `size` devices as our constants describe them, by the driver's name of one (a CPU's ends in ``process``); None where
    no preset does."""
    if device.endswith(" process"):
        return default_local_cluster(size)
    preset = preset_of_device(device)
    return preset_with_devices(preset, size) if preset else None


def constants(ours: Cluster, found: Calibration) -> Iterator[Constant]:
    """Yield the rates of the device, then each collective's seconds: no threshold, whoever reads the table judges. Kernels are
    timed alone: programs, to which our fractions are fitted, may reach less of the same device."""
    measured = found.cluster
    rates = dict(_rates(measured.device, [dtype for dtype, _ in measured.device.peak]))
    for (name, unit), rate in _rates(ours.device, [dtype for dtype, _ in measured.device.peak]):
        yield Constant(name, unit, rate, rates[name, unit])
    for way in ("read", "write"):
        if ours.host is not None and measured.host is not None:
            mine, seen = (getattr(each.host, f"{way}_bytes_per_second") for each in (ours, measured))
            yield Constant(f"host memory, {way}", "byte/s", mine, seen)
    size = measured.size
    if size < 2:
        return
    axis = AxisLink(size, (Level(ours.links[0], size),), ours.device.launch_seconds, ours.algorithms)
    for each in found.run.collectives:
        name = f"{each.name} of {each.work:.0f} bytes over {size}"
        yield Constant(name, "s", collective_seconds(each.name, each.work, axis), each.seconds)


def _rates(device: Device, dtypes: Sequence[str]) -> Iterator[tuple[tuple[str, str], float]]:
    main = "bfloat16" if device.kind == "cuda" else "float32"
    yield ("memory of the device", "byte"), float(device.memory_bytes)
    yield ("context and libraries", "byte"), float(device.base_bytes)
    yield ("streaming", "byte/s"), device.bandwidth_bytes_per_second * device.bandwidth_fraction
    yield ("one small kernel", "s"), device.launch_seconds
    for dtype in dtypes:
        yield (f"matrix products, {dtype}", "FLOP/s"), device.product_flops_per_second(dtype)
    yield (f"attention, {main}", "FLOP/s"), device.matrix_peak_flops_per_second(main) * device.attention_fraction
    yield (f"convolutions, {main}", "FLOP/s"), device.convolution_flops_per_second(main)
