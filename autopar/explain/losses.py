"""Why a step is not faster: the seconds beyond those of the model's FLOPs at the device's peak, by what they go into."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation
from autopar.cost_models.step.stage_devices import stage_clusters
from autopar.explain.reasons import COMPUTE, parts_of_step
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate

PRODUCTS, ATTENTION = "matrix products below the peak", "attention below the peak"
STREAMING = "operations that memory bandwidth bounds (norms, activations)"
RECOMPUTED, UNEVEN = "what the backward computes again", "more work than the mean of the stages"
_SMALLEST_SHARE = 0.005
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
