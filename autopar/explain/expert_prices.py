"""The prices of placing experts anew: a step by its expert load, and the exchange of experts between ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.compute.kernels import streaming_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.expert_load import ExpertLoad
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import PlanError
from autopar.ir.plan_file.plan_file import Plan


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
