"""Words of a run on its plan: lines on the measurement of this machine and on the plan that was chosen, by the logger
``autopar``; the answer to a step that ran out of memory (what its plan predicted, and the nearest plan that would have fitted);
and the prices of placing experts anew: a step by its expert load, and the exchange of experts between ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.compute.kernels import streaming_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.hardware.workload import ExpertLoad
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import PlanError
from autopar.explain.reasons import EvaluatedChange, evaluate_changes
from autopar.ir.describe import cut_short_text
from autopar.ir.plan_file.plan_file import Plan
from autopar.runtime.quantities import size_words
from autopar.runtime.step.out_of_memory import Usage

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


LOGGER = logging.getLogger("autopar")


def say_measuring(line: str) -> None:
    """Write a line before, and one after, this machine is measured: as a warning, since somebody waits who sees nothing else."""
    LOGGER.warning("%s", line)


def say_plan(plan: Plan) -> None:
    """Write one line: the model, the plan, and what it is predicted to take."""
    predicted = plan.document.predicted
    step = f", {1e3 * predicted.step_seconds:.3g} ms a step" if predicted.step_seconds else ""
    memory = f", {predicted.peak_memory_bytes / 2**30:.3g} GiB a device" if predicted.peak_memory_bytes else ""
    text = f"{plan.document.model.name} on {plan.document.cluster.name}: {plan.describe()}{step}{memory} (predicted)"
    LOGGER.info("%s", text.replace("\n", " "))
    if limit := plan.document.search.cut_short:
        LOGGER.warning("planning %s was %s", plan.document.model.name, cut_short_text(limit))


@dataclass(frozen=True)
class ExpertPrices:
    """The prices of `plan`, whose blocks run `compiled` or not."""

    plan: Plan
    compiled: bool

    @property
    def _cluster(self) -> Cluster:
        if not self.plan.document.cluster.description:
            raise PlanError("the plan does not describe its cluster, so that no move has a price: pass steps=None")
        return with_compilation(Cluster.from_dict(self.plan.document.cluster.description), self.compiled)

    def step_seconds(self, imbalance: float) -> float:
        """The predicted seconds of a step in which the busiest expert rank has so many times the mean of the token copies."""
        cluster = replace(self._cluster, expert_load=ExpertLoad(max(1.0, imbalance)))
        return evaluate(self.plan.graph, self.plan.candidate, cluster, self.plan.document.optimizer).step_seconds

    def move_seconds(self, axis: str, sent_bytes: float) -> float:
        """The seconds of an exchange over the mesh axis in which no rank sends more than `sent_bytes`, which are copied before
        and after it."""
        cluster, mesh = self._cluster, self.plan.candidate.mesh
        links = links_of_axis(cluster, mesh, mesh.index(axis))
        full_bytes = sent_bytes * links.size**2 / (links.size - 1)  # of an even one a rank sends (n - 1) / n of its n-th part
        return collective_seconds("all_to_all", full_bytes, links) + streaming_seconds(cluster.device, 4 * sent_bytes)
