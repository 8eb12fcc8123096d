"""``--what-if``: the same model planned under another constraint, compared with the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation
from autopar.errors import AutoparError
from autopar.explain.reasons import recomputed_words
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import Plan
from autopar.solve.infeasible import enlarged
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.force import Force, parse_force, with_forced_offload
from autopar.solve.space.options import SearchOptions

_GIB = 2.0**30
CLUSTER_KEYS = ("nodes", "memory")
_MOST = {"nodes": 1e5, "memory": 1e6, "batch": 1e9}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Changed constraints: `force` fixes degrees, as in ``tp=8,zero=3``; `nodes` and `memory_gib` change the cluster, `batch` the
    global batch (0: as it is)."""

    force: Force = field(default_factory=lambda: Force({}))
    nodes: int = 0
    memory_gib: float = 0.0
    batch: int = 0


def parse_what_if(text: str) -> WhatIf:
    """Parse ``tp=8``, ``nodes=16``, ``memory=160`` (GiB per device), ``batch=64``, or several with commas."""
    entries = dict(item.partition("=")[::2] for item in text.split(",") if item.strip())
    changes: dict[str, float] = {}
    for key in [key for key in entries if key.strip() in (*CLUSTER_KEYS, "batch")]:
        value = entries.pop(key).strip()
        try:
            changes[key.strip()] = float(value)
        except ValueError:
            raise AutoparError(f"what-if: {key}={value} is not a number; write tp=8, nodes=16, memory=160 or batch=64") from None
    for name, number in changes.items():
        if not 0 < number <= _MOST[name] or (name != "memory" and number != int(number)):
            whole = "a number" if name == "memory" else "a whole number"
            raise AutoparError(f"what-if: {name}={number:g} is not {whole} above 0, at most {_MOST[name]:g}")
    force = parse_force(",".join(f"{key}={value}" for key, value in entries.items()))
    if force.is_configuration:
        raise AutoparError("what-if: a whole configuration leaves nothing to plan; price it with `autopar plan --force`")
    return WhatIf(force, int(changes.get("nodes", 0)), changes.get("memory", 0.0), int(changes.get("batch", 0)))


def plan_what_if(
    graph: Graph, cluster: Cluster, options: SearchOptions, question: WhatIf, progress: Callable[[str], None] | None = None
) -> tuple[Cluster, PlanResult]:
    """Search under the changed constraints. Raises what `search` does (Infeasible)."""
    if question.nodes:
        cluster = enlarged(cluster, question.nodes)
    if question.memory_gib:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=int(question.memory_gib * _GIB)))
    options = replace(
        with_forced_offload(options, question.force),
        force={**options.force, **question.force.degrees},
        schedule=question.force.schedule or options.schedule,
        batch=question.batch or options.batch,
    )
    return cluster, search(graph, cluster, options, progress)


def what_if_options(plan: Plan, time_limit_seconds: float) -> SearchOptions:
    """Return the options of a search that asks what the plan's own asked. AutoparError for a plan for inference."""
    if plan.document.inference is not None:
        raise AutoparError("--what-if searches as for training, and this plan is for inference: plan again with the change")
    return SearchOptions(
        batch=plan.candidate.batch,
        precision=plan.candidate.precision,
        optimizer=plan.document.optimizer,
        time_limit_seconds=time_limit_seconds,
        pins=plan.document.search.constrained,
    )


def compare_plans(
    before: tuple[Candidate, Evaluation], after: tuple[Candidate, Evaluation], devices: tuple[int, int]
) -> list[tuple[str, str, str]]:
    """Return (what, before, after): the figures of both plans, and where they differ in mesh, ZeRO and recomputation."""
    rows = []
    (old, a), (new, b) = before, after
    per = [each.step_seconds / plan.batch * count for (plan, each), count in zip((before, after), devices, strict=True)]
    rows.append(("step", f"{a.step_seconds:.4g} s", f"{b.step_seconds:.4g} s"))
    rows.append(("device-seconds per example", f"{per[0]:.4g}", f"{per[1]:.4g} ({per[1] / per[0] - 1:+.1%})"))
    rows.append(("peak memory", f"{a.peak_memory_bytes / _GIB:.1f} GiB", f"{b.peak_memory_bytes / _GIB:.1f} GiB"))
    rows.append(("MFU", f"{a.mfu:.1%}", f"{b.mfu:.1%}"))
    for name in ("compute", "exposed", "stall", "optimizer"):
        pair = [getattr(each, f"{name}_seconds") for each in (a, b)]
        if max(pair) > 1e-3 * a.step_seconds:
            rows.append((f"{name} seconds", f"{pair[0]:.4g}", f"{pair[1]:.4g}"))
    rows.append(("mesh", _mesh(old), _mesh(new)))
    rows.append(("ZeRO", _zeros(old), _zeros(new)))
    rows.append(("recomputed", recomputed_words(old) or "-", recomputed_words(new) or "-"))
    return rows


def _mesh(candidate: Candidate) -> str:
    stages = candidate.pipeline.stages
    micro_batches = f", {candidate.micro_batches} micro-batches" if candidate.micro_batches > 1 else ""
    return (f"pp={stages} x " if stages > 1 else "") + str(candidate.mesh) + micro_batches


def _zeros(candidate: Candidate) -> str:
    return ", ".join(f"ZeRO-{zero}" for zero in sorted({plan.zero for plan in candidate.blocks}))
