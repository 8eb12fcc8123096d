"""The answer to a step that ran out of memory: what its plan predicted, and the nearest plan that would have fitted."""

from __future__ import annotations

from autopar.cost_models.hardware.cluster import Cluster
from autopar.explain.reasons import EvaluatedChange, evaluate_changes
from autopar.ir.plan_file.plan_file import Plan
from autopar.runtime.step.out_of_memory import Usage, size_words

_GIB = 2.0**30


def memory_answer(plan: Plan, usage: Usage) -> str:
    """Write the predicted peak by kind, and the fastest change of the plan that takes as much less as was missing."""
    predicted = plan.document.predicted
    peak = predicted.peak_memory_bytes
    if not peak:
        return ""
    kinds = ", ".join(f"{kind} {size_words(size)}" for kind, size in predicted.memory.items() if size)
    wanted_bytes = peak * usage.total / (usage.total + usage.asked) if usage.asked else peak - 1.0
    return f"the plan predicted a peak of {size_words(peak)} ({kinds}); {_remedy(plan, wanted_bytes)}"


def _remedy(plan: Plan, wanted_bytes: float) -> str:
    """Write the change whose predicted peak is at most `wanted_bytes`, or the one that takes least memory."""
    cluster = Cluster.from_dict(plan.document.cluster.description)
    peak = plan.document.predicted.peak_memory_bytes or 0
    changes = [
        each
        for each in evaluate_changes(plan.graph, plan.candidate, cluster, plan.document.optimizer)
        if each.peak_memory_bytes < peak
    ]
    enough = [each for each in changes if each.peak_memory_bytes <= wanted_bytes]
    less = f"plan for devices of {wanted_bytes / _GIB:.3g} GiB (`memory_gib` in the cluster's file)"
    if enough:
        return f"{_words(plan, min(enough, key=lambda each: each.step_seconds))}, or {less}"
    if changes:
        most = min(changes, key=lambda each: each.peak_memory_bytes)
        return f"no single change is predicted to take as little as {size_words(wanted_bytes)}: {less}, or {_words(plan, most)}"
    return f"{less}, a smaller batch, or more devices"


def _words(plan: Plan, change: EvaluatedChange) -> str:
    """Write the change, what it is predicted to take, and how it is asked for."""
    pipeline = plan.candidate.pipeline
    degrees = ([f"pp={pipeline.stages}"] if pipeline.stages > 1 else []) + [
        f"{axis.name}={axis.size}" for axis in plan.candidate.mesh.axes if axis.size > 1
    ]
    option = f' with force="{",".join([*degrees, change.force])}"' if change.force else ""
    return f"plan{option} ({change.name}: {size_words(change.peak_memory_bytes)}, {change.step_seconds:.3g} s a step)"
