"""Costs of blocks that candidates of one graph share: what depends on mesh and micro-batch, and not on recomputation or ZeRO."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.stage_devices import stage_cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Candidate


class SharedCosts:
    """The shared costs for `evaluate` of several candidates of one graph's blocks on one cluster. Nodes whose plans are one
    object in two candidates are priced once."""

    def __init__(self, graph: Graph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self._by_mesh: dict[tuple[Mesh, int, int], dict[str, BlockCosts]] = {}
        self._by_batch: dict[int, dict[str, BlockCosts]] = {}
        self._first: dict[str, BlockCosts] = {}

    def of(self, candidate: Candidate, cluster: Cluster | None = None) -> Mapping[str, BlockCosts]:
        """Return the costs by the names of the blocks; empty where stages have different devices. `cluster`: the part of the
        devices that the candidate is on, always the same for one mesh (else: a stage's)."""
        if len({group.device for group in self.cluster.groups}) > 1:
            return {}
        key = candidate.mesh, candidate.micro_batch, candidate.zero_group
        if key not in self._by_mesh:
            cluster = cluster or stage_cluster(self.cluster, candidate.pipeline.stages)
            self._by_mesh[key] = {
                block.name: BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster, candidate.zero_group)
                for block in self.graph.blocks
            }
            self._share(self._by_mesh[key], candidate.micro_batch)
        return self._by_mesh[key]

    def _share(self, costs: Mapping[str, BlockCosts], batch: int) -> None:
        same = self._by_batch.setdefault(batch, {})
        for name, each in costs.items():
            first = same.get(name) or self._first.get(name)
            if first is not None:
                each.share_with(first)
            same.setdefault(name, each)
            self._first.setdefault(name, each)
