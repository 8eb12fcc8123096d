"""What a plan's step and memory are made of, in words, and what single changes of it would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.cost_models.pipeline import part_of
from autopar.errors import PlanError
from autopar.ir.describe import pipeline_words
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate

_TIGHT = 0.9
"""From this share of the device's memory on, memory is said to bind."""

_WORTH_A_WORD = 0.005
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Change:
    """The same plan with one thing changed, priced by the evaluator without solving anything again."""

    name: str
    step_seconds: float
    peak_memory_bytes: int
    fits: bool


def parts_of_step(evaluation: Evaluation) -> list[tuple[str, float]]:
    """(what, seconds), the largest first; they add up to the step."""
    known = [
        ("computing", evaluation.compute_seconds),
        ("waiting for collectives of the model axes", evaluation.exposed_seconds),
        ("waiting for the data axis (weights, gradients)", evaluation.waited_seconds),
        ("the optimizer", evaluation.optimizer_seconds),
    ]
    rest = evaluation.step_seconds - sum(seconds for _, seconds in known)
    known.append(("pipeline bubble and transfers between stages", rest))
    return sorted(((name, each) for name, each in known if each > 1e-6 * evaluation.step_seconds), key=lambda pair: -pair[1])


def sentences(graph: Graph, candidate: Candidate, cluster: Cluster, evaluation: Evaluation) -> Iterator[str]:
    """Why the plan is as it is: what the time goes into, which link carries most, and whether memory binds."""
    parts = parts_of_step(evaluation)
    shares = [(name, seconds / evaluation.step_seconds) for name, seconds in parts]
    said = ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= _WORTH_A_WORD)
    yield f"The step of {evaluation.step_seconds:.4g} s is {said}."
    if candidate.pipeline.stages > 1:
        yield _stages(candidate, evaluation)
    yield _links(candidate, cluster, evaluation)
    used, capacity = evaluation.peak_memory_bytes, evaluation.memory_capacity_bytes
    kind, size = max(evaluation.memory, key=lambda row: row[1])
    share = used / capacity
    binds = "memory binds" if share >= _TIGHT else "memory does not bind"
    yield (
        f"The peak takes {used / _GIB:.1f} of {capacity / _GIB:.1f} GiB ({share:.0%}), most of it {kind} "
        f"({size / _GIB:.1f} GiB): {binds}{_saved(candidate)}."
    )
    for axis, redundant in evaluation.redundant_share:
        if redundant > 0.001:
            yield f"Every rank of {axis} repeats {redundant:.1%} of the FLOPs."


def _stages(candidate: Candidate, evaluation: Evaluation) -> str:
    """How evenly the stages work, and what they wait."""
    busy = [stage.busy_seconds for stage in evaluation.stages]
    calls = [len(stage.calls) for stage in evaluation.stages]
    longest = max(range(len(busy)), key=busy.__getitem__)
    return (
        f"Its pipeline is {pipeline_words(candidate, evaluation.bubble_share)}: stages of {min(calls)} to {max(calls)} blocks "
        f"work {min(busy):.4g} to {max(busy):.4g} s a step, stage {longest} longest."
    )


def _links(candidate: Candidate, cluster: Cluster, evaluation: Evaluation) -> str:
    axes = {name: seconds for name, seconds in evaluation.axis_seconds if seconds > 0}
    if not axes:
        return "Nothing is communicated."
    name = max(axes, key=lambda axis: axes[axis])
    mesh = candidate.mesh
    link = links_of_axis(part_of(cluster, candidate.pipeline.stages), mesh, mesh.index(name))
    over = " and ".join(sorted(link.names)) or "no link"
    return (
        f"Most communication is on {name} ({mesh.size_of(name)} ranks over {over}): {axes[name]:.4g} s a step, "
        f"of which the step waits for what does not hide behind computing."
    )


def _saved(candidate: Candidate) -> str:
    whole = [plan.block for plan in candidate.blocks if plan.recompute]
    some = [f"{len(plan.again)} operations of {plan.block}" for plan in candidate.blocks if plan.again]
    out = [f"{', '.join(whole + some)} run again in the backward to save memory"] if whole or some else []
    hosts = [plan.block for plan in candidate.blocks if plan.offload]
    out += [f"tensors of {', '.join(hosts)} wait on the host"] if hosts else []
    return "".join(f"; {each}" for each in out)


def changes(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str) -> list[Change]:
    """One change at a time: every state sharding, nothing recomputed, everything recomputed, half and twice the micro-batches."""
    out = []
    for name, changed in _changed(graph, candidate):
        try:
            priced = evaluate(graph, changed, cluster, optimizer)
        except PlanError:  # a schedule that takes no such number of micro-batches
            continue
        out.append(Change(name, priced.step_seconds, priced.peak_memory_bytes, priced.fits))
    return out


def _changed(graph: Graph, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    plans = candidate.blocks
    if candidate.mesh.size_of(DATA_AXIS) > 1:
        for zero in range(4):
            if any(plan.zero != zero for plan in plans):
                yield f"ZeRO-{zero} for all blocks", replace(candidate, blocks=tuple(replace(p, zero=zero) for p in plans))
    kept = tuple(replace(plan, recompute=False, again=(), again_arcs=(), offload=()) for plan in plans)
    if kept != plans:
        yield "nothing recomputed or offloaded", replace(candidate, blocks=kept)
    again = tuple(replace(plan, recompute=graph.count(plan.block) > 1) for plan in kept)
    if again != plans:
        yield "repeated blocks recomputed whole", replace(candidate, blocks=again)
    degree = candidate.mesh.size_of(DATA_AXIS)
    for parts in (candidate.micro_batches // 2, candidate.micro_batches * 2):
        if parts and candidate.batch % (degree * parts) == 0:
            yield f"{parts} micro-batch{'es' if parts > 1 else ''} a step", replace(candidate, micro_batches=parts)
