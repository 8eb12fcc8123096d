"""What the backward of a block runs again, what is kept for it, and what a plan that cannot do so lacks.

A tensor is *needed* where autograd kept it for some operation's backward, or where an operation or conversion runs again from it.
What is needed and not made again is kept. Tensors are told apart by storage (`storages.aliases`): a kept view keeps all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.flops import VIEWS, packet
from autopar.cost_models.storages import Aliases, State, aliases
from autopar.errors import PlanError
from autopar.ir.graph import Block
from autopar.ir.placement import format_placements
from autopar.ir.plan import Arc, BlockPlan, NodePlan


@dataclass(frozen=True, slots=True)
class Replay:
    """`nodes` (in the order of the forward) and `arcs` run once more. Bytes per storage, by the name of its first state: `kept`
    from forward to backward, without parameters as they are stored; of these `offloaded` wait on the host; `recomputed` are what
    the backward needs and only the replay makes: they live while the block's backward runs."""

    nodes: tuple[str, ...]
    arcs: tuple[Arc, ...]
    kept: Mapping[State, float]
    recomputed: Mapping[State, float]
    offloaded: Mapping[State, float]

    @staticmethod
    def of(costs: BlockCosts, plan: BlockPlan, same: Aliases) -> Replay:
        """`same` are the aliases of the plan. PlanError where the backward uses a tensor that nobody kept."""
        needs = _Needs(costs, plan, same)
        if plan.recompute:
            given = {same.find(state) for state in needs.inputs}
            nodes, arcs = needs.closure(lambda state: same.find(state) in given)
        else:
            nodes, arcs = frozenset(plan.again), frozenset(plan.again_arcs)
        needs.check(nodes, arcs)
        kept = needs.kept(nodes, arcs)
        return Replay(
            tuple(node.name for node in costs.block.nodes if node.name in nodes),
            tuple(arc for arc in plan.arcs if arc in arcs),
            kept,
            {state: size for state, size in needs.backward.items() if state not in kept and state not in needs.stored},
            needs.offloaded(kept),
        )


def again_without(costs: BlockCosts, plan: BlockPlan, kept: Callable[[State], bool], ready: Collection[str]) -> BlockPlan:
    """The plan with the least in `again` where only such tensors are kept, and those that no node of `ready` makes."""
    nodes, arcs = _Needs(costs, plan, aliases(costs.block, plan.nodes, plan.arcs)).closure(kept, ready)
    return replace(
        plan,
        recompute=False,
        again=tuple(node.name for node in costs.block.nodes if node.name in nodes),
        again_arcs=tuple(arc for arc in plan.arcs if arc in arcs),
    )


def bound_once(block: Block) -> frozenset[str]:
    """Values whose later reading gives something else: buffers that the block updates, and views of them."""
    found = {name for name, _ in block.updates}
    for node in block.nodes:
        if packet(node.op) in VIEWS and found & set(node.operands()):
            found.update(value.name for value in node.outputs)
    return frozenset(found)


class _Needs:
    """Who makes what, and what the backward of every node asks for."""

    def __init__(self, costs: BlockCosts, plan: BlockPlan, same: Aliases) -> None:
        self.costs, self.plan, self.same = costs, plan, same
        block = costs.block
        self.plans: dict[str, NodePlan] = {each.node: each for each in plan.nodes}
        self.inputs = {(value.name, at) for value, at in zip(block.inputs, plan.inputs, strict=True)}
        self.stored = frozenset(
            same.find((parameter.value.name, at)) for parameter, at in zip(block.parameters, plan.parameters, strict=True)
        )
        self.makers: dict[State, str | Arc] = {(arc.value, arc.target): arc for arc in plan.arcs}
        self.sizes: dict[State, float] = {}
        self.asked: list[State] = []
        for node in block.nodes:
            each = self.plans[node.name]
            for value, at in zip(node.outputs, each.results, strict=True):
                self.makers[value.name, at] = node.name
            for kept in costs.kept(each):
                state = kept.value, kept.placements
                self.asked.append(state)
                self.sizes[state] = kept.bytes
                if kept.value == f"{node.name}+":
                    self.makers[state] = node.name
        self.once = bound_once(block)
        self.backward = {self.same.find(state): self.bytes_of(self.same.find(state)) for state in self.asked}

    def bytes_of(self, state: State) -> float:
        return self.sizes[state] if state[0].endswith("+") else self.costs.value_bytes(*state)

    def sources(self, maker: str | Arc) -> Iterator[State]:
        """What an operation or a conversion reads."""
        if isinstance(maker, Arc):
            yield maker.value, maker.source
        else:
            yield from zip(self.costs.nodes[maker].operands(), self.plans[maker].operands, strict=True)

    def closure(
        self, kept: Callable[[State], bool], ready: Collection[str] | None = None
    ) -> tuple[frozenset[str], frozenset[Arc]]:
        """The least that must run again where only these tensors are kept. What no node of `ready` makes is kept, too; PlanError
        where that is not enough."""
        nodes: set[str] = set()
        arcs: set[Arc] = set()
        pending = list(self.asked)
        seen: set[State] = set()
        while pending:
            state = pending.pop()
            if state in seen or self.same.find(state) in self.stored or kept(state):
                continue
            seen.add(state)
            maker = self.makers.get(state)
            if isinstance(maker, Arc) and maker.value not in self.once:
                arcs.add(maker)
            elif isinstance(maker, str) and (ready is None or maker in ready):
                nodes.add(maker)
            elif ready is None:
                raise self._nobody(state)
            else:
                continue
            assert maker is not None
            pending += self.sources(maker)
        return frozenset(nodes), frozenset(arcs)

    def kept(self, nodes: Iterable[str], arcs: Iterable[Arc]) -> dict[State, float]:
        """What is needed and not made again."""
        again: set[str | Arc | None] = {*nodes, *arcs}
        needed = [*self.asked, *(state for maker in again if maker is not None for state in self.sources(maker))]
        left = dict.fromkeys(self.same.find(state) for state in needed if self.makers.get(state) not in again)
        return {state: self.bytes_of(state) for state in left if state not in self.stored}

    def check(self, nodes: Iterable[str], arcs: Iterable[Arc]) -> None:
        """Nothing that runs again reads what the step has overwritten by then."""
        makers: list[str | Arc] = [*nodes, *arcs]
        for maker in makers:
            for state in self.sources(maker):
                if state[0] in self.once:
                    raise self._nobody(state)

    def offloaded(self, kept: Mapping[State, float]) -> dict[State, float]:
        out = {}
        for state in self.plan.offload:
            root = self.same.find(state)
            if root not in kept:
                raise self._nobody(state)
            out[root] = kept[root]
        return out

    def _nobody(self, state: State) -> PlanError:
        text = f"{state[0]} as {format_placements(state[1])!r}"
        return PlanError(f"block {self.plan.block}: the backward uses {text}, which nobody kept; plan the model again")
