"""The parts of the step and the memory of a plan in sentences, what single changes of the plan would cost, and why a step is not
faster: the seconds beyond those of the model's FLOPs at the device's peak, by what they go into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.stage_devices import stage_cluster, stage_clusters
from autopar.errors import PlanError
from autopar.ir.describe import describe_pipeline
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.partition_saved import saving_everything
from autopar.ir.plan import Candidate

_TIGHT = 0.9
"""Share of the device's memory from which on memory is said to bind."""

_SMALLEST_SHARE = 0.005
COMPUTE = "compute"
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class EvaluatedChange:
    """The plan with one thing changed, evaluated without solving again. `force` asks the search for it, as in ``zero=3``; it is
    empty where nothing does."""

    name: str
    step_seconds: float
    peak_memory_bytes: int
    fits: bool
    force: str = ""


def stage_words(evaluation: Evaluation) -> str:
    """Say of which stage a table of the step is: ``, of stage 3 of 8 (the bottleneck)``; empty without a pipeline."""
    stages = len(evaluation.stages)
    return f", of stage {evaluation.bottleneck} of {stages} (the bottleneck)" if stages > 1 else ""


def parts_of_step(evaluation: Evaluation) -> list[tuple[str, float]]:
    """Return (what, seconds), the largest first; they add up to the step of the bottleneck stage."""
    parts = [
        (COMPUTE, evaluation.compute_seconds),
        (
            "exposed communication of the model axes",
            evaluation.exposed_seconds - evaluation.host_stall_seconds - evaluation.launch_stall_seconds,
        ),
        ("exposed copies to host memory and back", evaluation.host_stall_seconds),
        ("the host's launches, beyond the device's time", evaluation.launch_stall_seconds),
        ("stalls on the data axis (weights, gradients)", evaluation.stall_seconds),
        ("optimizer", evaluation.optimizer_seconds),
    ]
    rest = evaluation.step_seconds - sum(seconds for _, seconds in parts)
    parts.append(("pipeline bubble, p2p between stages", rest))
    return sorted(((name, each) for name, each in parts if each > 1e-6 * evaluation.step_seconds), key=lambda pair: -pair[1])


def plan_reasons(graph: Graph, candidate: Candidate, cluster: Cluster, evaluation: Evaluation) -> Iterator[str]:
    """Say what the time goes into, which axis communicates most, and whether memory binds."""
    parts = parts_of_step(evaluation)
    shares = [(name, seconds / evaluation.step_seconds) for name, seconds in parts]
    text = ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= _SMALLEST_SHARE)
    stage = stage_words(evaluation)
    yield f"The step of {evaluation.step_seconds:.4g} s{stage and f'{stage},'} is {text}."
    if candidate.pipeline.stages > 1:
        yield _stages(candidate, evaluation)
    yield _links(candidate, cluster, evaluation)
    yield _memory(graph, candidate, cluster, evaluation)
    for axis, redundant in evaluation.redundant_share:
        if redundant > 0.001:
            yield f"Every rank of {axis} repeats {redundant:.1%} of the FLOPs."


def _stages(candidate: Candidate, evaluation: Evaluation) -> str:
    """Say how balanced the stages are, and their bubble."""
    busy = [stage.busy_seconds for stage in evaluation.stages]
    calls = [len(stage.calls) for stage in evaluation.stages]
    return (
        f"Its pipeline is {describe_pipeline(candidate, evaluation.bubble_share)}: stages of {min(calls)} to {max(calls)} blocks "
        f"are busy for {min(busy):.4g} to {max(busy):.4g} s a step; stage {evaluation.bottleneck} is the bottleneck."
    )


def _links(candidate: Candidate, cluster: Cluster, evaluation: Evaluation) -> str:
    axes = {name: seconds for name, seconds in evaluation.axis_seconds if seconds > 0}
    if not axes:
        return "The plan communicates nothing."
    name = max(axes, key=lambda axis: axes[axis])
    mesh = candidate.mesh
    link = links_of_axis(stage_cluster(cluster, candidate.pipeline.stages), mesh, mesh.index(name))
    over = " and ".join(sorted(link.names)) or "no link"
    return (
        f"Most communication is on {name} ({mesh.size_of(name)} ranks over {over}): {axes[name]:.4g} s a step, "
        f"overlapped or exposed."
    )


def _memory(graph: Graph, candidate: Candidate, cluster: Cluster, evaluation: Evaluation) -> str:
    """Say whether memory binds: little is left, or more would be taken than there is without what saves memory."""
    used, capacity = evaluation.peak_memory_bytes, evaluation.memory_budget_bytes
    kind, size = max(evaluation.memory, key=lambda row: row[1])
    share, tight = used / capacity, used / capacity >= _TIGHT
    saved = tuple(map(saving_everything, candidate.blocks))
    without, fits = "", True
    if saved != candidate.blocks:
        whole = evaluate(graph, replace(candidate, blocks=saved), cluster)
        fits = whole.peak_memory_bytes <= capacity and whole.fits
        without = f"; without that the peak would take {whole.peak_memory_bytes / _GIB:.1f} GiB"
    binds = "memory binds" if tight or not fits else "memory does not bind"
    return (
        f"The peak takes {used / _GIB:.1f} of {capacity / _GIB:.1f} GiB that a plan may take ({share:.0%}), most of it {kind} "
        f"({size / _GIB:.1f} GiB): {binds}{_memory_savings(candidate)}{without}."
    )


def recomputed_words(candidate: Candidate) -> str:
    """Say which blocks are recomputed whole, and how many operations of the others; empty where nothing is."""
    whole = [plan.block for plan in candidate.blocks if plan.recompute]
    some = [f"{len(plan.recompute_nodes)} operations of {plan.block}" for plan in candidate.blocks if plan.recompute_nodes]
    return ", ".join(whole + some)


def _memory_savings(candidate: Candidate) -> str:
    recomputed = recomputed_words(candidate)
    out = [f"recomputed in the backward to save memory: {recomputed}"] if recomputed else []
    offloaded = [plan.block for plan in candidate.blocks if plan.offload]
    out += [f"tensors of {', '.join(offloaded)} are offloaded to host memory"] if offloaded else []
    parts = [f"{len(plan.partition_saved)} tensors of {plan.block}" for plan in candidate.blocks if plan.partition_saved]
    out += [f"saved in parts over a model axis and gathered in the backward: {', '.join(parts)}"] if parts else []
    return "".join(f"; {each}" for each in out)


def evaluate_changes(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str) -> list[EvaluatedChange]:
    """Evaluate one change at a time: every ZeRO stage, nothing recomputed, all repeated blocks recomputed, half and twice the
    micro-batches."""
    out = []
    for name, force, changed in _single_changes(graph, candidate):
        try:
            evaluation = evaluate(graph, changed, cluster, optimizer)
        except PlanError:  # the schedule does not take this number of micro-batches
            continue
        out.append(EvaluatedChange(name, evaluation.step_seconds, evaluation.peak_memory_bytes, evaluation.fits, force))
    return out


def _single_changes(graph: Graph, candidate: Candidate) -> Iterator[tuple[str, str, Candidate]]:
    """Yield each change in words and as what is forced, and the changed plan."""
    plans = candidate.blocks
    if candidate.mesh.size_of(DATA_AXIS) > 1:
        for zero in range(4):
            if any(plan.zero != zero for plan in plans):
                yield (
                    f"ZeRO-{zero} for all blocks",
                    f"zero={zero}",
                    replace(candidate, blocks=tuple(replace(p, zero=zero) for p in plans)),
                )
    all_saved = tuple(map(saving_everything, plans))
    if all_saved != plans:
        yield "nothing recomputed, offloaded or partitioned", "", replace(candidate, blocks=all_saved)
    recomputed = tuple(replace(plan, recompute=graph.count(plan.block) > 1) for plan in all_saved)
    if recomputed != plans:
        yield "repeated blocks recomputed whole", "", replace(candidate, blocks=recomputed)
    degree = candidate.mesh.size_of(DATA_AXIS)
    for number in (candidate.micro_batches // 2, candidate.micro_batches * 2):
        if number and candidate.batch % (degree * number) == 0:
            words = f"{number} micro-batch{'es' if number > 1 else ''} a step"
            yield words, f"micro={number}", replace(candidate, micro_batches=number)


PRODUCTS, ATTENTION = "matrix products below the peak", "attention below the peak"
STREAMING = "operations that memory bandwidth bounds (norms, activations)"
RECOMPUTED, UNEVEN = "what the backward computes again", "more work than the mean of the stages"
_NAMED = 4


@dataclass(frozen=True, slots=True)
class StepLosses:
    """`ideal_seconds` are those of the model's FLOPs at the peak; with `parts`, the largest first, they add up to the step of the
    bottleneck stage."""

    ideal_seconds: float
    parts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        step = self.ideal_seconds + sum(seconds for _, seconds in self.parts)
        named = [(name, seconds) for name, seconds in self.parts[:_NAMED] if seconds >= _SMALLEST_SHARE * step]
        lost = ", ".join(f"{seconds:.3g} s {name}" for name, seconds in named)
        share = self.ideal_seconds / step if step else 0.0
        ideal = f"At the peak of the devices the model's FLOPs take {self.ideal_seconds:.3g} s ({share:.0%})"
        return f"{ideal}; the largest losses: {lost}."


def step_losses(graph: Graph, candidate: Candidate, cluster: Cluster, evaluation: Evaluation, optimizer: str) -> StepLosses:
    """Return where the seconds of the bottleneck stage go beyond the peak."""
    stage = evaluation.bottleneck
    breakdown = cost_breakdown(graph, candidate, cluster, optimizer, stage)
    device = stage_clusters(cluster, candidate.pipeline.stages)[stage].device
    peak = device.matrix_peak_flops_per_second(candidate.precision.compute) * candidate.mesh.size
    lost = defaultdict(float, breakdown.other_seconds)
    useful = 0.0
    for each in breakdown.operations:
        profile = breakdown.costs[each.block].profile(each.plan.node)
        ideal = each.times * profile.model_flops / peak
        useful += ideal
        lost[RECOMPUTED] += each.recomputed_seconds
        kind = ATTENTION if profile.attention else PRODUCTS if profile.forward_flops else STREAMING
        lost[kind] += each.seconds - each.recomputed_seconds - ideal
    whole = evaluation.mfu * evaluation.step_seconds
    lost[UNEVEN] += useful - whole
    lost |= {name: seconds for name, seconds in parts_of_step(evaluation) if name != COMPUTE}
    parts = sorted(lost.items(), key=lambda part: -part[1])
    return StepLosses(whole, tuple((name, seconds) for name, seconds in parts if abs(seconds) > 1e-9 * evaluation.step_seconds))
