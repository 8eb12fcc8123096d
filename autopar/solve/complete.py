"""A complete configuration, forced: nothing is searched, and `plan` says what `validate` says of the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from time import monotonic

from autopar.cost_models.evaluate import evaluate
from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError
from autopar.ir.chunks import SCHEDULES
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.rules.registry import Registry
from autopar.solve.candidates import MeshResult
from autopar.solve.forced import RECOMPUTE, Forced, forced
from autopar.solve.ilp import Status
from autopar.solve.search import SearchResult

COMPLETE = ("tp", "pp", "zero", "micro_batches", "recompute", "zero_group", "sequence_parallel")
"""What a complete configuration says. The data degree is what the cluster leaves."""

_MORE = ("virtual", "dp", "schedule", "weight_versions")
_ONLY_COMPLETE = ("micro_batches", "recompute", "sequence_parallel")


def complete(force: str | Mapping[str, int | str], precision: Precision, optimizer: str) -> Forced | None:
    """``tp=8,pp=2,zero=1,micro_batches=4,recompute=full,zero_group=0,sequence_parallel=1`` (and ``virtual=2``,
    ``schedule=gpipe``, ``weight_versions=2``), or None where the search is to decide. AutoparError where only a part of it is
    given, or a value makes no sense."""
    pairs = force.items() if isinstance(force, Mapping) else [item.partition("=")[::2] for item in force.split(",") if item]
    given = {key.strip(): str(value).strip() for key, value in pairs}
    if not any(key in given for key in _ONLY_COMPLETE):
        return None
    missing = [key for key in COMPLETE if key not in given]
    unknown = [key for key in given if key not in (*COMPLETE, *_MORE)]
    if missing or unknown:
        wrong = f"{', '.join(missing)} missing" if missing else f"{', '.join(unknown)} not among them"
        raise AutoparError(f"force: a configuration with {_first(given)} has to be complete ({', '.join(COMPLETE)}): {wrong}")
    if given["recompute"] not in RECOMPUTE:
        raise AutoparError(f"force: recompute={given['recompute']} is none of {', '.join(RECOMPUTE)}")
    if given.get("schedule", SCHEDULES[0]) not in SCHEDULES:
        raise AutoparError(f"force: schedule={given['schedule']} is none of {', '.join(SCHEDULES)}")
    numbers = {key: _whole(key, text) for key, text in given.items() if key not in ("recompute", "schedule")}
    return Forced(
        tp=numbers["tp"],
        sequence_parallel=bool(numbers["sequence_parallel"]) and numbers["tp"] > 1,
        pp=numbers["pp"],
        virtual=numbers.get("virtual", 1),
        zero=numbers["zero"],
        zero_group=numbers["zero_group"],
        micro_batches=numbers["micro_batches"],
        recompute=given["recompute"],
        schedule=given.get("schedule", "1f1b"),
        weight_versions=numbers.get("weight_versions", 1),
        precision=precision,
        optimizer=optimizer,
    )


def _first(given: Mapping[str, str]) -> str:
    return next(f"{key}={given[key]}" for key in _ONLY_COMPLETE if key in given)


def _whole(key: str, text: str) -> int:
    least = 0 if key in ("zero", "zero_group", "sequence_parallel") else 1
    if not text.isdigit() or int(text) < least or (key == "zero" and int(text) > 3):
        raise AutoparError(f"force: {key}={text} is no degree; write a whole number of at least {least} (zero: 0 to 3)")
    return int(text)


def priced(graph: Graph, cluster: Cluster, wanted: Forced, registry: Registry) -> SearchResult:
    """The configuration as a search of one candidate. Where it does not fit, its status is INFEASIBLE: it can be looked at."""
    began = monotonic()
    candidate = forced(graph, cluster, wanted, registry=registry)
    evaluation = evaluate(graph, candidate, cluster, wanted.optimizer)
    status = Status.OPTIMAL if evaluation.fits else Status.INFEASIBLE
    seconds = evaluation.step_seconds
    result = MeshResult(
        candidate.mesh,
        status=status,
        bound_seconds=seconds if evaluation.fits else inf,
        candidate=candidate,
        evaluation=evaluation,
        micro_batches=candidate.micro_batches,
        zero_group=candidate.zero_group,
    )
    return SearchResult(candidate, evaluation, {}, status, seconds, 0.0, (result,), monotonic() - began)
