"""The fastest plan of a small graph by exhaustion over strategies and conversion trees."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from autopar.cost_models.comm.conversion_costs import conversion_cost
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import state_cost
from autopar.cost_models.state.state_group import state_group
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.ir.graph import Block, Graph, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Invariant, Placements, Replicate, Shard, can_shard
from autopar.ir.plan import NodePlan, Precision
from autopar.rules.conversions import placement_states
from autopar.rules.expand import block_strategies, combine_axes
from autopar.rules.registry import default_registry
from support.plans.conversion_graph import single_axis_conversions


class Exhaustion:
    """The least seconds over all strategies, boundaries and storages, without a data axis (``dp=1``): every conversion tree is an
    exact Steiner arborescence over all legal conversions. Shares prices with the solver, and no other code."""

    def __init__(self, graph: Graph, mesh: Mesh, cluster: Cluster, precision: Precision) -> None:
        self.graph, self.mesh, self.cluster, self.precision = graph, mesh, cluster, precision
        self.costs = {block.name: BlockCosts(block, mesh, graph.batch, cluster) for block in graph.blocks}
        self.steiner = lru_cache(maxsize=None)(self._steiner)

    def best_seconds(self) -> float:
        """Blocks in a row share the placements between them; so: the least over placements of the chain's only boundary class."""
        hidden = self.graph.block("Middle").inputs[0]
        options = [Invariant(), Replicate(), *(Shard(dim) for dim in range(1, len(hidden.shape)))]
        sizes = self.mesh.sizes
        ends = [at for at in product([Shard(0)], *[options] * (len(sizes) - 1)) if can_shard(hidden.shape, at, sizes)]
        whole = (Shard(0), *[Replicate()] * (len(sizes) - 1))
        loss = (Invariant(),) * len(sizes)
        calls = self.graph.count("Middle")
        return min(
            self._block("Prologue", whole, at) + calls * self._block("Middle", at, at) + self._block("Epilogue", at, loss)
            for at in ends
        )

    def _plans(self, name: str) -> list[list[NodePlan]]:
        block, values = self.graph.block(name), self.graph.block(name).values()
        per_axis = [
            block_strategies(block, size, batch_axis=axis == 0, batch_is_symbolic=True, registry=default_registry())
            for axis, size in enumerate(self.mesh.sizes)
        ]
        out = []
        for node in block.nodes:
            data = [s for s in per_axis[0][node.name] if Shard(0) in (*s.operands, *s.results)]
            out.append(list(combine_axes([data, *(axis[node.name] for axis in per_axis[1:])], node, values, self.mesh.sizes)))
        return out

    def _block(self, name: str, start: Placements, end: Placements) -> float:
        block, costs = self.graph.block(name), self.costs[name]
        plans = self._plans(name)
        seconds = [[costs.node(plan).seconds for plan in each] for each in plans]
        return min(
            sum(spent[i] for spent, i in zip(seconds, chosen, strict=True))
            + self._conversions(block, [each[i] for each, i in zip(plans, chosen, strict=True)], start, end)
            for chosen in product(*[range(len(each)) for each in plans])
        )

    def _conversions(self, block: Block, plans: list[NodePlan], start: Placements, end: Placements) -> float:
        produced: dict[str, Placements] = {block.inputs[0].name: start}
        needs: dict[str, set[Placements]] = {block.outputs[0]: {end}}
        for node, plan in zip(block.nodes, plans, strict=True):
            for name, at in zip(node.operands(), plan.operands, strict=True):
                needs.setdefault(name, set()).add(at)
            produced.update((value.name, at) for value, at in zip(node.outputs, plan.results, strict=True))
        values, total = block.values(), 0.0
        for parameter in block.parameters:
            options = [Invariant(), Shard(0), Shard(1)]
            total += min(
                self.steiner(parameter.value, (Replicate(), *at), frozenset(needs[parameter.value.name]))
                + self._update(block, parameter.value.name, (Replicate(), *at))
                for at in product(*[options] * (len(self.mesh.sizes) - 1))
                if can_shard(parameter.value.shape, (Replicate(), *at), self.mesh.sizes)
            )
        for name, source in produced.items():
            total += self.steiner(values[name], source, frozenset(needs.get(name, ())))
        return total

    def _update(self, block: Block, name: str, at: Placements) -> float:
        parameter = next(each for each in block.parameters if each.value.name == name)
        group = state_group([(parameter, at)], self.mesh, self.precision)
        link = links_of_axis(self.cluster, self.mesh, 0)
        return state_cost(group, 0, link, self.cluster.device, self.precision, optimizer_named("adamw")).optimizer_seconds

    def _steiner(self, value: Value, source: Placements, needs: frozenset[Placements]) -> float:
        """Dreyfus and Wagner (1971) on the directed graph of all legal conversions."""
        whole = (source[0], *[Replicate()] * (len(source) - 1))
        among = placement_states(value.shape, (source, *needs, whole), self.mesh.sizes, value.differentiable)
        weight: dict[Placements, list[tuple[Placements, float]]] = {at: [] for at in among}
        for a, b in single_axis_conversions(value.shape, among, self.mesh.sizes, value.differentiable):
            cost = conversion_cost(value, a, b, self.mesh, self.graph.batch, self.cluster)
            weight[a].append((b, cost.forward_seconds + cost.backward_seconds))
        ends = sorted(needs, key=str)
        best: dict[tuple[int, Placements], float] = {}
        for mask in range(1, 1 << len(ends)):
            for at in among:
                if mask & (mask - 1) == 0:
                    best[mask, at] = 0.0 if at == ends[mask.bit_length() - 1] else float("inf")
                else:
                    splits = [part for part in range(1, mask) if part & mask == part]
                    best[mask, at] = min(best[part, at] + best[mask ^ part, at] for part in splits)
            for _ in among:
                for at in among:
                    best[mask, at] = min([best[mask, at], *(cost + best[mask, to] for to, cost in weight[at])])
        return best[(1 << len(ends)) - 1, source] if ends else 0.0
