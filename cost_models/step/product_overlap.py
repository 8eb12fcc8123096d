"""Collectives of conversions that run beside products in compiled blocks. The collective that completes the gradient of products'
operand runs beside the gradients of their weights, which nothing waits for. In asynchronous tensor parallelism an all-gather runs
in pieces with the products that read it, and a product with the reduce-scatter of its result: each of n ranks has n pieces, and
one of them has nothing beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.compute.overlapped_collectives import weight_gradient_nodes
from autopar.cost_models.hardware.mesh_links import async_tp_axes
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.placement import Partial, Placements, Shard
from autopar.ir.plan import Conversion, NodePlan
from autopar.operations.products import LINEAR

LEAST_ELEMENTS = (1 << 18) + 1
"""A tensor's whose collective runs in pieces: smaller ones may share a collective (`passes.bucket_conversions`)."""


@dataclass(frozen=True, slots=True)
class ProductOverlap:
    """The collectives of one value, or of its gradient (`backward`), that run beside products. The products read the converted
    value, or (not `reads`) one has made it. axis: the only mesh axis, on which collectives and products run in pieces, one of
    those `axes`; None: gradients of weights run beside collectives of any axis."""

    costs: BlockCosts
    value: str
    products: tuple[str, ...]
    reads: bool
    backward: bool
    axis: int | None = None
    axes: tuple[int, ...] = ()

    def hidden_seconds(self, conversion: Conversion, plans: Mapping[str, NodePlan]) -> float:
        """Return the seconds of a conversion's collective that products hide, whose plans are given by name."""
        source, target = conversion.source, conversion.target
        at, products = self.placement(source, target), (plans[name] for name in self.products)
        beside = sum(self.product_seconds(plan) for plan in products if self.product_placement(plan) == at)
        return min(self.collective_seconds(source, target), beside) if beside else 0.0

    def placement(self, source: Placements, target: Placements) -> Placements:
        """Return which placement of a conversion the products read or make."""
        return target if self.reads else source

    def product_placement(self, plan: NodePlan) -> Placements:
        """Return the placement that a product reads, or makes."""
        return plan.operands[0] if self.reads else plan.results[0]

    def collective_seconds(self, source: Placements, target: Placements) -> float:
        """Return the seconds of a conversion's collective that products may hide, were they long enough."""
        if self.axis is None:
            cost = self.costs.conversion(self.value, source, target)
            return (1.0 - self.costs.cluster.overlap.contention) * cost.backward_comm_seconds
        if not self._is_decomposed(source, target):
            return 0.0
        cost = self.costs.conversion(self.value, source, target)
        whole = cost.backward_comm_seconds if self.backward else cost.forward_comm_seconds
        launches = (self.costs.mesh.sizes[self.axis] - 1) * self.costs.cluster.device.launch_seconds
        return max(0.0, self._share * whole - launches)

    def _is_decomposed(self, source: Placements, target: Placements) -> bool:
        assert self.axis is not None
        if source[self.axis] == target[self.axis]:
            return False
        shard, other = (source, target)[:: 1 if self.reads else -1]
        at, value = shard[self.axis], self.costs.values[self.value]
        if not isinstance(at, Shard) or at.parts > 1 or not 0 <= at.dim < len(value.shape) - 1:
            return False
        cost = self.costs.conversion(self.value, source, target)
        if self.reads:
            return cost.forward_kind == "all_gather" and self._is_large(cost.full_bytes)
        kinds = cost.forward_kind, cost.backward_kind
        return other[self.axis] == Partial() and kinds == ("reduce_scatter", "all_gather") and self._is_large(cost.full_bytes)

    def _is_large(self, full_bytes: float) -> bool:
        return full_bytes >= LEAST_ELEMENTS * itemsize(self.costs.values[self.value].dtype)

    def product_seconds(self, plan: NodePlan) -> float:
        """Return the seconds of a product that may hide collectives."""
        weight = self.costs.weight_gradient_seconds(plan)
        if self.axis is None:
            return weight
        if plan.function or (self.reads and any(plan.results[0][axis] == Partial() for axis in self.axes)):
            return 0.0  # a product with both has its reduce-scatter in pieces
        cost = self.costs.node(plan)
        return self._share * (cost.backward_seconds - weight if self.backward else cost.forward_seconds)

    @property
    def _share(self) -> float:
        assert self.axis is not None
        return (1.0 - 1.0 / self.costs.mesh.sizes[self.axis]) * (1.0 - self.costs.cluster.overlap.contention)


def product_overlaps(costs: BlockCosts) -> Mapping[str, tuple[ProductOverlap, ...]]:
    """Return the overlaps of each value of a block, where the software has them."""
    if costs.overlaps is None:
        out: dict[str, tuple[ProductOverlap, ...]] = {}
        for each in _overlaps(costs):
            out[each.value] = (*out.get(each.value, ()), each)
        costs.overlaps = out
    return costs.overlaps


def _overlaps(costs: BlockCosts) -> Iterator[ProductOverlap]:
    block, readers = costs.block, dict[str, list[str]]()
    for name in sorted(weight_gradient_nodes(block)):
        readers.setdefault(costs.nodes[name].operands()[0], []).append(name)
    if costs.cluster.overlap.weight_gradients:
        for value, names in readers.items():
            yield ProductOverlap(costs, value, tuple(names), reads=True, backward=True)
    uses = Counter([*(name for node in block.nodes for name in node.operands()), *block.outputs])
    axes = async_tp_axes(costs.cluster, costs.mesh)
    for axis in axes:
        for value, names in readers.items():
            if matrices := tuple(name for name in names if _is_plain(costs, name)):
                yield ProductOverlap(costs, value, matrices, reads=True, backward=False, axis=axis, axes=axes)
            for name in matrices:
                if uses[name] == 1 and name not in readers:
                    yield ProductOverlap(costs, name, (name,), reads=False, backward=False, axis=axis)
                    if costs.values[value].differentiable:
                        yield ProductOverlap(costs, name, (name,), reads=False, backward=True, axis=axis)


def _is_plain(costs: BlockCosts, name: str) -> bool:
    """Return whether a product is one matrix product in the graph of inductor: one with a bias is another operator."""
    return costs.nodes[name].op == LINEAR and len(costs.nodes[name].operands()) == 2
