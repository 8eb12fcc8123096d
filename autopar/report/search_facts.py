"""What the search looked at, other software's prices, and what single changes would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from autopar.cost_models.hardware.cluster import Cluster, with_devices
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.errors import AutoparError
from autopar.explain.reasons import EvaluatedChange, evaluate_changes
from autopar.ir.describe import describe
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.document import MeshResult
from autopar.ir.plan_file.plan_file import Plan


def search_facts(plan: Plan, evaluation: Evaluation) -> dict[str, Any]:
    """Return every point of the search with its status, the lower bound, the frontier, and what the file does not hold."""
    search, predicted = plan.document.search, plan.document.predicted
    solved = [each for each in search.meshes if each.step_seconds is not None and each.peak_memory_bytes is not None]
    return {
        "status": search.status,
        "points": [
            [each.mesh, each.status, each.bound_seconds, each.step_seconds, each.peak_memory_bytes, each.reason]
            for each in search.meshes
        ],
        "frontier": [[each.peak_memory_bytes, each.step_seconds] for each in _frontier(solved)],
        "bound_seconds": predicted.lower_bound_seconds,
        "gap": predicted.gap,
        "chosen": [evaluation.peak_memory_bytes, evaluation.step_seconds],
        "fastest": [search.fastest.plan, search.fastest.step_seconds] if search.fastest else None,
        "missing": list(_missing(plan, len(solved))),
    }


def _frontier(solved: Sequence[MeshResult]) -> list[MeshResult]:
    """Return the points that no other beats in both time and memory, by memory."""
    out: list[MeshResult] = []
    for each in sorted(solved, key=lambda point: (point.peak_memory_bytes or 0, point.step_seconds or 0.0)):
        if not out or (each.step_seconds or 0.0) < (out[-1].step_seconds or 0.0):
            out.append(each)
    return out


def _missing(plan: Plan, solved: int) -> Iterator[str]:
    """Yield what the plan's file does not say of its search, in sentences."""
    search = plan.document.search
    if not search.meshes:
        yield "The file has no search: the configuration was fixed, or the plan was written by hand."
        return
    others = len(search.meshes) - solved
    if others:
        yield (
            f"{others} of {len(search.meshes)} points have no time and memory: they were closed by their lower bound, do not "
            "fit, or were not tried. They are drawn by their bound alone, on the right."
        )
    yield "Of a point the file keeps the best plan alone: plans that the solver passed on the way are not in it."
    if plan.document.predicted.lower_bound_seconds is None:
        yield "The file has no lower bound."
    if search.cut_short:
        yield f"The search was cut short by {search.cut_short}."


def price_facts(plan: Plan, evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the baselines as they were priced when the plan was made, after the plan itself."""
    rows: list[dict[str, Any]] = [
        {
            "title": "this plan", "software": "", "step_seconds": evaluation.step_seconds, "own_step_seconds": None,
            "peak_bytes": evaluation.peak_memory_bytes, "memory": "fits" if evaluation.fits else "does not fit",
            "configuration": plan.describe(), "problem": "", "measured": "", "reason": "",
        }
    ]  # fmt: skip
    for key, each in plan.document.baselines.items():
        if each is None:
            continue
        rows.append(
            {
                "title": each.title or key.upper(),
                "software": each.software,
                "step_seconds": each.step_seconds if each.fits else None,
                "own_step_seconds": each.own_step_seconds if each.fits else None,
                "peak_bytes": each.peak_memory_bytes,
                "memory": each.memory or ("fits" if each.fits else "does not fit"),
                "configuration": each.configuration,
                "problem": each.problem,
                "measured": each.measured,
                "reason": each.reason,
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class SearchedChange:
    """The plan of a new search under another constraint (`explain.what_if`)."""

    name: str
    graph: Graph
    candidate: Candidate
    evaluation: Evaluation
    cut_short: str = ""

    def describe(self) -> str:
        """Return the constraint and what was found under it."""
        how = f", cut short by {self.cut_short}" if self.cut_short else ""
        return f"{self.name}, searched{how}: {describe(self.graph, self.candidate)}"


def what_if_facts(plan: Plan, cluster: Cluster, searched: Sequence[SearchedChange] = ()) -> list[dict[str, Any]]:
    """Return what new searches found, and the plan with one thing changed, each evaluated without a search. Of twice and half the
    devices each has as many examples as before."""
    optimizer = plan.document.optimizer
    rows = [_row(each.describe(), each.candidate, each.evaluation) for each in searched]
    changes = evaluate_changes(plan.graph, plan.candidate, cluster, optimizer)
    rows += [_row(each.name, plan.candidate, each) for each in changes]
    for name, candidate, other in _resized(plan.candidate, cluster):
        try:
            changed = evaluate(plan.graph, candidate, other, optimizer)
        except AutoparError:  # a cluster, or sizes of shards, that do not divide so
            continue
        rows.append(_row(name, candidate, changed))
    return rows


def budget_facts(plan: Plan, cluster: Cluster, evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return this plan, and the fastest of what was solved, or evaluated with one thing changed, for each memory of a device from
    which on another one is the fastest, the least memory first: what more memory would save, and less would cost."""
    changes = evaluate_changes(plan.graph, plan.candidate, cluster, plan.document.optimizer)
    options = [("this plan", evaluation.peak_memory_bytes, evaluation.step_seconds)]
    options += [(f"this plan, {each.name}", each.peak_memory_bytes, each.step_seconds) for each in changes]
    options += [
        (each.mesh, each.peak_memory_bytes, each.step_seconds)
        for each in plan.document.search.meshes
        if each.step_seconds is not None and each.peak_memory_bytes is not None
    ]
    out: list[dict[str, Any]] = []
    for name, peak, seconds in sorted(options, key=lambda option: option[1:]):
        fastest = min((row["step_seconds"] for row in out), default=inf)
        if name == "this plan" or seconds < fastest * (1 - _SAME):
            out.append({"name": name, "peak_bytes": peak, "device_bytes": peak / (1 - cluster.device.memory_margin),
                        "step_seconds": seconds, "fits": peak <= evaluation.memory_budget_bytes})  # fmt: skip
    return out


_SAME = 1e-3
"""The share of a step that is no reason to name another plan."""


def _row(name: str, candidate: Candidate, evaluation: Evaluation | EvaluatedChange) -> dict[str, Any]:
    seconds = evaluation.step_seconds
    return {
        "name": name, "step_seconds": seconds, "examples_per_second": candidate.batch / seconds if seconds else None,
        "peak_bytes": evaluation.peak_memory_bytes, "fits": evaluation.fits,
    }  # fmt: skip


def _resized(candidate: Candidate, cluster: Cluster) -> Iterator[tuple[str, Candidate, Cluster]]:
    """Yield the plan on twice and half the data ranks, with as many examples on each. Nothing of a cluster of several kinds, or
    without links, nor of processes on one machine, whose cores do not become more."""
    if cluster.groups or not cluster.links or cluster.device.kind == "cpu":
        return
    degree = candidate.mesh.size_of(DATA_AXIS)
    for name, twice, half in (("twice the devices, twice the batch", 2, 1), ("half the devices, half the batch", 1, 2)):
        sizes = (degree, candidate.batch, cluster.size, candidate.zero_group or half)
        if DATA_AXIS not in candidate.mesh.names or any(size % half for size in sizes):
            continue
        axes = tuple(
            replace(axis, size=axis.size * twice // half) if axis.name == DATA_AXIS else axis for axis in candidate.mesh.axes
        )
        resized = replace(
            candidate, mesh=replace(candidate.mesh, axes=axes), batch=candidate.batch * twice // half,
            zero_group=min(candidate.zero_group, degree * twice // half),
        )  # fmt: skip
        size = cluster.size * twice // half
        yield name, resized, with_devices(cluster, f"{cluster.name}, {size} devices", size)
