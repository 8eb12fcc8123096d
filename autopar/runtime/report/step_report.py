"""The report of measured steps: numbers agreed over ranks, beside the plan's prediction, as text, JSON, log lines and scalars."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..device.mesh import DATA_AXIS, PIPELINE_AXIS
from ..errors import StateError
from .compare import as_text, comparison, scalars
from .meter import TIED
from .trace_event import measured_step_events

FORMAT = "autopar measured step"
VERSION = 1
LOGGER = logging.getLogger("autopar")

_DATA = (DATA_AXIS, "all", TIED)


@dataclass(eq=False, repr=False)
class StepReport:
    """The result of `parallel.report()`, equal on all ranks. `measured` is the JSON of `save`; `predicted` is None for an
    exported program, to which `autopar compare plan.json measured.json` adds it.

    ``print(report)`` shows all of it. `log`, `save`, `save_trace` and `to_tensorboard` do nothing on ranks other than 0. `spans`
    are what the first rank of each stage did in the last step, in order: (label, seconds).
    """

    measured: dict[str, Any]
    predicted: dict[str, Any] | None
    rank: int = 0
    spans: Mapping[int, Sequence[tuple[str, float]]] = field(default_factory=dict)

    def __str__(self) -> str:
        return as_text(comparison(self.measured, self.predicted))

    @property
    def advice(self) -> list[str]:
        """Return what is off, and which constant of the cluster to calibrate."""
        return list(comparison(self.measured, self.predicted)["advice"])

    def scalars(self) -> dict[str, float]:
        """The figures by tag (``step/seconds``, ``stage0/compute_seconds``), predicted ones under ``predicted/``."""
        return scalars(self.measured, self.predicted)

    def to_tensorboard(self, writer: Any, step: int) -> None:
        """Call ``writer.add_scalar(tag, value, step)`` for each of `scalars`, on rank 0: of a `SummaryWriter`, or what has its
        method."""
        for tag, value in self.scalars().items() if self.rank == 0 else ():
            writer.add_scalar(f"autopar/{tag}", value, step)

    def log(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        """The lines of the report to a logger (default ``autopar``), on rank 0."""
        for line in str(self).splitlines() if self.rank == 0 else ():
            (logger or LOGGER).log(level, "%s", line)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the measured step as JSON, on rank 0, for `autopar compare plan.json measured.json`."""
        if self.rank == 0:
            _write(path, json.dumps({"format": FORMAT, "version": VERSION, **self.measured}, indent=1))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last measured step in Chrome's trace event format, on rank 0, with the names of `autopar trace`: a process
        for the first rank of each stage, whose clock begins with its own step."""
        if self.rank == 0:
            _write(path, json.dumps({"traceEvents": list(measured_step_events(self.spans)), "displayTimeUnit": "ms"}))


def _write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all."""
    target = Path(path)
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
    except OSError as error:
        raise StateError(f"the report cannot be written to {target}: {error.strerror or error}") from None


def combine(ranks: Sequence[Mapping[str, Any]], mesh: Mapping[str, int], device: str, compiled: bool) -> dict[str, Any]:
    """Return one document of what each rank measured: means over the steps and over the ranks of a stage, the most of any rank
    where that decides."""
    count = min(len(each["steps"]) for each in ranks)
    ends = [max(_seconds(each["steps"][step]) for each in ranks) for step in range(count)]
    stages = sorted({each["stage"] for each in ranks})
    parts = {stage: [each for each in ranks if each["stage"] == stage] for stage in stages}
    first = ranks[0]
    return {
        "ranks": len(ranks),
        "mesh": dict(mesh),
        "device": device,
        "compiled": compiled,
        "steps": count,
        "micro_batches": first["micro_batches"],
        "step_seconds": sum(ends) / count,
        "least_step_seconds": min(ends),
        "between_seconds": _mean(step["between"] for step in first["steps"][1:count]),
        "examples": _mean(step["examples"] for step in first["steps"][:count]),
        "stages": [_stage(stage, parts[stage], count) for stage in stages],
        "blocks": [row for stage in stages for row in _blocks(stage, parts[stage], count)],
        "collectives": [row for stage in stages for row in _collectives(stage, parts[stage], count)],
        "memory": [_memory(stage, parts[stage]) for stage in stages if any(each["memory"] for each in parts[stage])],
    }


def _seconds(step: Mapping[str, Any], *kinds: str, processor: bool = False) -> float:
    """Return the seconds of all labels of these kinds (without any: of all)."""
    return sum(float(each[processor]) for label, each in step["seconds"].items() if not kinds or label.partition(" ")[0] in kinds)


def _wait_seconds(step: Mapping[str, Any], axes: str) -> float:
    """Return the seconds of waits on the data axis, the pipeline axis or the others."""
    total = 0.0
    for label, (clock, _) in step["seconds"].items():
        kind, _, what = label.partition(" ")
        if kind == "wait":
            axis = what.rpartition(" ")[2]
            total += clock * (axes == ("data" if axis in _DATA else "pipeline" if axis == PIPELINE_AXIS else "model"))
    return total


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


_COMPUTE = ("forward", "backward", "other")


def _stage(stage: int, ranks: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Parts of the step of one stage; they add up to its seconds."""
    steps = [step for each in ranks for step in each["steps"][:count]]
    compute = [_seconds(step, *_COMPUTE) for step in steps]
    return {
        "stage": stage,
        "ranks": len(ranks),
        "seconds": _mean(map(_seconds, steps)),
        "compute_seconds": _mean(compute),
        "most_compute_seconds": max(_mean(_seconds(step, *_COMPUTE) for step in each["steps"][:count]) for each in ranks),
        "blocks_seconds": _mean(_seconds(step, "forward", "backward") for step in steps),
        "least_processor_seconds": min(_seconds(step, *_COMPUTE, "optimizer", processor=True) for step in steps),
        "processor_seconds": _mean(_seconds(step, *_COMPUTE, processor=True) for step in steps),
        "model_wait_seconds": _mean(_wait_seconds(step, "model") for step in steps),
        "data_wait_seconds": _mean(_wait_seconds(step, "data") for step in steps),
        "pipeline_wait_seconds": _mean(_wait_seconds(step, "pipeline") for step in steps),
        "optimizer_seconds": _mean(_seconds(step, "optimizer") for step in steps),
    }


def _blocks(stage: int, ranks: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    steps = [step for each in ranks for step in each["steps"][:count]]
    rows = []
    for name, (modules, prefix) in ranks[0]["blocks"].items():
        if not any(name in step["calls"] for step in steps):
            continue
        row = {"stage": stage, "block": name, "first": prefix, "modules": modules}
        row["calls"] = steps[0]["calls"].get(name, 0)
        for kind in ("forward", "backward"):
            row[f"{kind}_seconds"] = _mean(step["seconds"].get(f"{kind} {name}", (0.0,))[0] for step in steps)
        rows.append(row)
    return rows


def _collectives(stage: int, ranks: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows of collectives. `seconds`: from the launch until the wait ended, of the rank that came last (the least),
    which waits for nobody."""
    names = dict.fromkeys(name for each in ranks for step in each["steps"][:count] for name in step["sent"])
    rows = []
    for name in names:
        kind, _, axis = name.rpartition(" ")
        sent = [[step["sent"].get(name, (0, 0, 0.0)) for step in each["steps"][:count]] for each in ranks]
        waits = [_mean(step["seconds"].get(f"wait {name}", (0.0,))[0] for step in each["steps"][:count]) for each in ranks]
        row = {"stage": stage, "kind": kind, "axis": axis, "times": sent[0][0][0], "bytes": sent[0][0][1]}
        row["seconds"] = min(_mean(step[2] for step in each) for each in sent)
        rows.append(row | {"wait_seconds": _mean(waits), "most_wait_seconds": max(waits)})
    return rows


def _memory(stage: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the memory of the rank whose peak is highest."""
    fullest = max((each["memory"] for each in ranks if each["memory"]), key=lambda memory: memory["peak"])
    kinds = {kind: fullest[kind] for kind in ("parameters", "optimizer", "inputs")}
    rest = fullest["peak"] - sum(kinds.values())
    return {"stage": stage, "peak_bytes": fullest["peak"], **kinds, "gradients": fullest["gradients"], "rest": rest}
