"""Activation recomputation: the operations that a backward repeats, the tensors saved for it, and the check that a plan can be
run.

A tensor is *needed* where autograd saves it for some operation's backward, or where an operation or conversion is recomputed from
it. What is needed and not recomputed is saved. Tensors are told apart by storage (`tensors.aliases`): a saved view keeps its
storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.tensors.sizes import Aliases, PlacedValue, aliases
from autopar.errors import PlanError
from autopar.ir.graph import Block, Node
from autopar.ir.placement import Shard, format_placements
from autopar.ir.plan import BlockPlan, Conversion, NodePlan
from autopar.operations.pointwise import CLONE
from autopar.operations.table import operation
from autopar.rules.conversions import changed_axis


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """The tensors that a block recomputes, saves and offloads. Bytes are per storage, by its first (value, placements), on one
    device.

    nodes, conversions: recomputed in the backward, in the order of the forward.
    saved: from forward to backward, without parameters as they are stored.
    recomputed: what the backward needs and recomputes; it lives while the block's backward runs.
    offloaded: the part of `saved` that is in host memory meanwhile.
    partitioned: those of `saved` of which each rank of a mesh axis saves one part, with the index of the axis.
    same: the aliases of the plan.
    """

    nodes: tuple[str, ...]
    conversions: tuple[Conversion, ...]
    saved: Mapping[PlacedValue, float]
    recomputed: Mapping[PlacedValue, float]
    offloaded: Mapping[PlacedValue, float]
    partitioned: Mapping[PlacedValue, int]
    same: Aliases

    @staticmethod
    def of(costs: BlockCosts, plan: BlockPlan) -> RecomputePlan:
        """Work out the tensors of a plan. PlanError where the backward uses a tensor that is neither saved nor recomputed."""
        needs = _BackwardNeeds(costs, plan)
        if plan.recompute:
            inputs = {needs.same.find(value) for value in needs.inputs}
            nodes, conversions = needs.closure(lambda value: needs.same.find(value) in inputs)
        else:
            nodes, conversions = frozenset(plan.recompute_nodes), frozenset(plan.recompute_conversions)
        needs.check(nodes, conversions)
        saved = needs.saved(nodes, conversions)
        return RecomputePlan(
            nodes=tuple(node.name for node in costs.block.nodes if node.name in nodes),
            conversions=tuple(each for each in plan.conversions if each in conversions),
            saved=saved,
            recomputed={at: size for at, size in needs.backward.items() if at not in saved and at not in needs.stored},
            offloaded={storage: saved[storage] for storage in needs.storages(plan.offload, saved)},
            partitioned=needs.partitioned(saved),
            same=needs.same,
        )

    @property
    def repeats(self) -> frozenset[str | Conversion]:
        """The nodes and conversions that the backward computes again."""
        return frozenset((*self.nodes, *self.conversions))


def with_least_recompute(costs: BlockCosts, plan: BlockPlan, saved: Callable[[PlacedValue], bool]) -> BlockPlan:
    """Return the plan that recomputes least where only these tensors are saved, and those that no recomputable node produces."""
    needs = _BackwardNeeds(costs, plan)
    nodes, conversions = needs.closure(saved, recomputable_nodes(costs.block))
    return replace(
        plan,
        recompute=False,
        recompute_nodes=tuple(node.name for node in costs.block.nodes if node.name in nodes),
        recompute_conversions=tuple(each for each in plan.conversions if each in conversions),
    )


def with_saved_only(costs: BlockCosts, plan: BlockPlan) -> BlockPlan:
    """Return the plan without offloading and partition of tensors that the block does not save at these costs, which may be of
    another way to run it (a block that is not compiled saves others)."""
    whole = RecomputePlan.of(costs, replace(plan, offload=(), partition_saved=()))
    return replace(
        plan,
        offload=tuple(each for each in plan.offload if whole.same.find(each) in whole.saved),
        partition_saved=tuple(each for each in plan.partition_saved if whole.same.find(each[:2]) in whole.saved),
    )


def with_all_offloaded(costs: BlockCosts, plan: BlockPlan) -> BlockPlan:
    """Return the plan in which all that the block saves lies in host memory until its backward."""
    return replace(plan, offload=tuple(RecomputePlan.of(costs, plan).saved))


def overwritten_values(block: Block) -> frozenset[str]:
    """Return the values that are not the same in the backward: buffers that the block updates, views of them, and what is cloned,
    which another block may update (no other clone is left, see `capture.normalize.writes`)."""
    names = {name for name, _ in block.updates} | {node.operands()[0] for node in block.nodes if node.op == CLONE}
    for node in block.nodes:
        if operation(node.op).view and names & set(node.operands()):
            names.update(value.name for value in node.outputs)
    return frozenset(names)


def recomputable_nodes(block: Block) -> frozenset[str]:
    """Return the operations that give the same result when they are recomputed: they read no buffer that is updated. Random
    numbers are drawn from the same state of the generator."""
    overwritten = overwritten_values(block)
    return frozenset(node.name for node in block.nodes if overwritten.isdisjoint(node.operands()))


COPY = " (contiguous)"


class _BackwardNeeds:
    """The producer of each tensor of a block, and the tensors that the backward of every node uses."""

    def __init__(self, costs: BlockCosts, plan: BlockPlan) -> None:
        self.costs, self.plan, block = costs, plan, costs.block
        self.same = same = aliases(block, plan.nodes, plan.conversions)
        self.plans: dict[str, NodePlan] = {each.node: each for each in plan.nodes}
        self.inputs = {(value.name, at) for value, at in zip(block.inputs, plan.inputs, strict=True)}
        self.stored = frozenset(
            same.find((parameter.value.name, at)) for parameter, at in zip(block.parameters, plan.parameters, strict=True)
        )
        self.producers: dict[PlacedValue, str | Conversion] = {(each.value, each.target): each for each in plan.conversions}
        self.sizes: dict[PlacedValue, float] = {}
        self.used: list[PlacedValue] = []
        held: list[PlacedValue] = []
        for node in block.nodes:
            each = self.plans[node.name]
            for value, at in zip(node.outputs, each.results, strict=True):
                self.producers[value.name, at] = node.name
            for saved in costs.saved_tensors(each):
                placed = saved.value, saved.placements
                if self._is_copied(node, placed):
                    placed = f"{saved.value}{COPY}", saved.placements
                    self.producers[placed] = node.name
                self.used.append(self._before_gather(placed))
                held.append(placed)
                self.sizes[placed] = saved.bytes
                if saved.value == f"{node.name}+":
                    self.producers[placed] = node.name
                    self.sizes[placed] *= self._share_before_gather(node.name, each)
        self.overwritten = overwritten_values(block)
        self.backward = {self.same.find(placed): self.bytes_of(self.same.find(placed)) for placed in held}

    def _is_copied(self, node: Node, placed: PlacedValue) -> bool:
        """Whether attention saves a copy of an operand, since it is a view of something larger (`contiguous_operands`)."""
        if not (self.costs.cluster.state_layout.contiguous_operands and operation(node.op).attention):
            return False
        name, at = self.same.find(placed)
        return placed[0] in node.operands() and self.costs.value_bytes(name, at) > self.costs.value_bytes(*placed)

    def _before_gather(self, placed: PlacedValue) -> PlacedValue:
        """Return what is saved in place of `placed`: where the software gathers again, the shard that it was gathered from."""
        producer = self.producers.get(placed)
        if not self.costs.cluster.state_layout.regathered_operands or not isinstance(producer, Conversion):
            return placed
        axis = changed_axis(producer.source, producer.target)
        return (producer.value, producer.source) if isinstance(producer.source[axis], Shard) else placed

    def _share_before_gather(self, node: str, plan: NodePlan) -> float:
        """Return the share of a copy of an operand that a product saves (in float8): as much as of the operand."""
        at = self.costs.saved[node].extra_reference
        if at < 0 or operation(self.costs.nodes[node].op).experts:
            return 1.0
        placed = self.costs.nodes[node].operands()[at], plan.operands[at]
        return self.costs.value_bytes(*self._before_gather(placed)) / self.costs.value_bytes(*placed)

    def bytes_of(self, placed: PlacedValue) -> float:
        return self.sizes[placed] if placed[0].endswith(("+", COPY)) else self.costs.value_bytes(*placed)

    def operands(self, producer: str | Conversion) -> Iterator[PlacedValue]:
        """Yield what an operation or a conversion reads."""
        if isinstance(producer, Conversion):
            yield producer.value, producer.source
        else:
            yield from zip(self.costs.nodes[producer].operands(), self.plans[producer].operands, strict=True)

    def closure(
        self, saved: Callable[[PlacedValue], bool], ready: Collection[str] | None = None
    ) -> tuple[frozenset[str], frozenset[Conversion]]:
        """Return the least that must be recomputed where only these tensors are saved. What no node of `ready` produces is saved,
        too; PlanError where that is not enough."""
        nodes: set[str] = set()
        conversions: set[Conversion] = set()
        pending = list(self.used)
        seen: set[PlacedValue] = set()
        while pending:
            placed = pending.pop()
            if placed in seen or self.same.find(placed) in self.stored or saved(placed):
                continue
            seen.add(placed)
            producer = self.producers.get(placed)
            if isinstance(producer, Conversion) and producer.value not in self.overwritten:
                conversions.add(producer)
            elif isinstance(producer, str) and (ready is None or producer in ready):
                nodes.add(producer)
            elif ready is None:
                raise self._unsaved(placed)
            else:
                continue
            assert producer is not None
            pending += self.operands(producer)
        return frozenset(nodes), frozenset(conversions)

    def saved(self, nodes: Iterable[str], conversions: Iterable[Conversion]) -> dict[PlacedValue, float]:
        """Return what is needed and not recomputed."""
        recomputed: set[str | Conversion | None] = {*nodes, *conversions}
        needed = [*self.used, *(placed for each in recomputed if each is not None for placed in self.operands(each))]
        left = dict.fromkeys(self.same.find(placed) for placed in needed if self.producers.get(placed) not in recomputed)
        return {placed: self.bytes_of(placed) for placed in left if placed not in self.stored}

    def check(self, nodes: Iterable[str], conversions: Iterable[Conversion]) -> None:
        """Raise PlanError where something recomputed reads what the step has overwritten by then."""
        recomputed: list[str | Conversion] = [*nodes, *conversions]
        for producer in recomputed:
            for placed in self.operands(producer):
                if placed[0] in self.overwritten:
                    raise self._unsaved(placed)

    def storages(self, values: Iterable[PlacedValue], saved: Mapping[PlacedValue, float]) -> list[PlacedValue]:
        """Return the storages of values that are offloaded or partitioned. PlanError where one of them is not saved."""
        out = []
        for placed in values:
            out.append(self.same.find(placed))
            if out[-1] not in saved:
                raise self._unsaved(placed)
        return out

    def partitioned(self, saved: Mapping[PlacedValue, float]) -> dict[PlacedValue, int]:
        """Return the index of the mesh axis of each tensor that the plan partitions. An offloaded one stays on the host."""
        axes = [self.costs.mesh.index(axis) for _, _, axis in self.plan.partition_saved]
        values = [(value, at) for value, at, _ in self.plan.partition_saved]
        away = {self.same.find(placed) for placed in self.plan.offload}
        storages = zip(self.storages(values, saved), axes, strict=True)
        return {storage: axis for storage, axis in storages if storage not in away}

    def _unsaved(self, placed: PlacedValue) -> PlanError:
        text = f"{placed[0]} as {format_placements(placed[1])!r}"
        return PlanError(f"block {self.plan.block}: the backward uses {text}, which is not saved; plan the model again")
