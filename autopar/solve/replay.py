"""What is kept, made again or moved to the host: variables per storage, and their part of time and memory.

``S[t]`` tensor t is kept on the device, ``O[t]`` on the host, ``A[t]`` available in the backward, ``r[o, s]`` operation o runs
again under strategy s, ``c[step]`` a conversion runs again. Given strategies, conversions, S and O, the rest is determined, so
only S and O are integers. Tensors are storages (`cost_models.storages.aliases`): views and free conversions need no variables.
Those below a thousandth of a block's bytes are kept, unless what makes them runs again anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.cost_models.flops import VIEWS, packet
from autopar.cost_models.memory import kept_tensors
from autopar.cost_models.replay import bound_once
from autopar.cost_models.storages import Aliases, State, aliases
from autopar.ir.graph import Block, Node
from autopar.ir.placement import Placements
from autopar.ir.plan import Arc
from autopar.rules.conversions import conversion
from autopar.solve.boundary import Slot
from autopar.solve.formulation import Formulation
from autopar.solve.linear import INFINITY, Terms, add, total
from autopar.solve.problem import BlockTable, Choice, Seconds

_SMALL = 1e-3
"""Storages below this share of all that a block could keep are not worth a decision."""


@dataclass(slots=True)
class Storages:
    """One block. `sizes` in units of bytes. `kept`, `hosted` and `passing` (needed by the backward, and neither kept nor on the
    host) are variables per storage; `again` are operations and conversions that run again: their seconds and variables."""

    same: Aliases
    sizes: dict[State, float] = field(default_factory=dict)
    needs: dict[State, dict[str, dict[int, float]]] = field(default_factory=dict)
    kept: dict[State, int] = field(default_factory=dict)
    hosted: dict[State, int] = field(default_factory=dict)
    passing: dict[State, int] = field(default_factory=dict)
    again: list[tuple[Seconds, int]] = field(default_factory=list)

    def host_bytes(self) -> dict[int, float]:
        return {variable: self.sizes[state] for state, variable in self.hosted.items()}


@dataclass(frozen=True, slots=True)
class _Maker:
    """What makes a storage: x or y that it is there at all, the storages that it is made from, and its variable."""

    there: int
    sources: tuple[State, ...]
    variable: int | None


def storages(made: Formulation, name: str, table: BlockTable, decide: bool) -> Storages:
    """Variables and rows of one block. Without `decide` all that the backward needs is kept."""
    out = Storages(_aliases(table))
    for node, choices in table.choices.items():
        for choice, x in zip(choices, made.x[name, node], strict=True):
            for state, size in kept_tensors(table.costs, out.same, choice.plan):
                if size:
                    out.needs.setdefault(state, {}).setdefault(node, {})[x] = 1.0
                    out.sizes[state] = size / made.byte_unit
    if decide:
        _Rows(made, name, table, out).write()
    else:
        for state, by_node in out.needs.items():
            s = out.kept[state] = made.model.variable(1.0)
            for terms in by_node.values():
                # S[t] >= x that needs it, for every operation
                made.model.at_least(s, terms)
    return out


def replayable(block: Block) -> frozenset[str]:
    """Operations whose second run gives what the first gave: they read no buffer that is updated. Random numbers are drawn again
    from the same state."""
    once = bound_once(block)
    return frozenset(node.name for node in block.nodes if once.isdisjoint(node.operands()))


def _aliases(table: BlockTable) -> Aliases:
    plans = [choice.plan for choices in table.choices.values() for choice in choices]
    free = [
        Arc(value, moves.states[step.source], moves.states[step.target])
        for value, moves in table.moves.items()
        for step in moves.steps
        if step.alias and _free(table, value, moves.states[step.source], moves.states[step.target])
    ]
    return aliases(table.block, plans, free)


def _free(table: BlockTable, value: str, source: Placements, target: Placements) -> bool:
    axis = next(i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
    how = conversion(source[axis], target[axis], table.costs.values[value].differentiable)
    return how is not None and how.forward is None


def boundary_states(made: Formulation, table: BlockTable) -> Iterator[tuple[Slot, str, Placements, Terms]]:
    """Boundary states with the variables that say that the boundary is there; inputs last, so that they name a storage."""
    block, boundary = table.block, made.problem.boundary
    sides = (
        ("out", block.outputs),
        ("in", tuple(value.name for value in block.inputs)),
        ("param", tuple(parameter.value.name for parameter in block.parameters)),
    )
    for side, names in sides:
        for index, name in enumerate(names):
            slot = Slot(block.name, side, index)  # type: ignore[arg-type]
            number = boundary.classes[slot]
            for at, w in zip(made.problem.placements[number], made.w[number], strict=True):
                yield slot, name, at, {w: 1.0}


class _Rows:
    """The decisions of one block."""

    def __init__(self, made: Formulation, name: str, table: BlockTable, out: Storages) -> None:
        self.made, self.name, self.table, self.out = made, name, table, out
        self.model, self.find = made.model, out.same.find
        self.given: dict[State, dict[int, float]] = {}
        self.stored: dict[State, dict[int, float]] = {}
        for slot, value, at, w in boundary_states(made, table):
            if slot.side != "out":
                add((self.stored if slot.side == "param" else self.given).setdefault(self.find((value, at)), {}), w)
        self.makers: dict[State, list[_Maker]] = {}
        self.brought: set[State] = set()
        self.readers: list[tuple[State, dict[int, float]]] = []
        least: dict[str, float] = {}
        for state, size in out.sizes.items():
            least[state[0]] = min(least.get(state[0], INFINITY), size)
        self.small = _SMALL * sum(least.values())
        self.host = made.problem.cluster.host is not None

    def write(self) -> None:
        self._operations()
        self._conversions()
        available: dict[State, int] = {}
        for state in self._wanted():
            self._decide(state, available)
        self._supported(available)

    def _large(self, state: State) -> bool:
        """Whether the tensor is worth a decision; notes its size."""
        if state not in self.out.sizes:
            self.out.sizes[state] = 0.0 if state[0].endswith("+") else self.table.costs.value_bytes(*state) / self.made.byte_unit
        return self.out.sizes[state] > self.small

    def _operations(self) -> None:
        """r[o, s] <= x[o, s]; what it reads is A."""
        ready = replayable(self.table.block)
        nodes = self.table.costs.nodes
        for name, choices in self.table.choices.items():
            node = nodes[name]
            if packet(node.op) in VIEWS and node.operands():
                continue
            reads: dict[tuple[int, State], dict[int, float]] = {}
            for choice, x in zip(choices, self.made.x[self.name, name], strict=True):
                reading = [self.find(state) for state in zip(node.operands(), choice.plan.operands, strict=True)]
                sources = tuple(dict.fromkeys(reading))
                targets = self._results(node, choice)
                r = self.model.variable(1.0) if name in ready and any(map(self._large, targets)) else None
                for target in targets:
                    self.makers.setdefault(target, []).append(_Maker(x, sources, r))
                if r is None:
                    continue
                # r[o, s] <= x[o, s]
                self.model.row([(x, 1.0), (r, -1.0)], 0.0, INFINITY)
                self.out.again.append((choice.seconds, r))
                for index, state in enumerate(reading):
                    reads.setdefault((index, state), {})[r] = 1.0
            self.readers += [(state, terms) for (_, state), terms in reads.items()]

    def _results(self, node: Node, choice: Choice) -> dict[State, None]:
        """What the operation makes, and keeps beside it."""
        found = dict.fromkeys(self.find((value.name, at)) for value, at in zip(node.outputs, choice.plan.results, strict=True))
        extra = f"{node.name}+"
        for kept in self.table.costs.kept(choice.plan):
            if kept.value == extra:
                found[self.find((extra, kept.placements))] = None
        return found

    def _conversions(self) -> None:
        """c[step] <= y[step]; what it reads is A."""
        once = bound_once(self.table.block)
        for value, moves in self.table.moves.items():
            if value in once:
                continue
            for step, y in zip(moves.steps, self.made.y[self.name, value], strict=True):
                source, target = self.find((value, moves.states[step.source])), self.find((value, moves.states[step.target]))
                if source == target:
                    continue
                if target != (value, moves.states[step.target]):
                    self.brought.add(target)
                c = self.model.variable(1.0) if self._large(target) else None
                self.makers.setdefault(target, []).append(_Maker(y, (source,), c))
                if c is None:
                    continue
                # c[step] <= y[step]
                self.model.row([(y, 1.0), (c, -1.0)], 0.0, INFINITY)
                self.out.again.append((step.seconds, c))
                self.readers.append((source, {c: 1.0}))

    def _wanted(self) -> dict[State, None]:
        """What some backward needs, and what that may be made from."""
        wanted = dict.fromkeys(self.out.needs)
        pending = list(wanted)
        while pending:
            for maker in self.makers.get(pending.pop(), ()):
                if maker.variable is None:
                    continue
                for source in maker.sources:
                    if source not in wanted:
                        wanted[source] = None
                        pending.append(source)
        return wanted

    def _decide(self, state: State, available: dict[State, int]) -> None:
        model, out, large = self.model, self.out, self._large(state)
        host = self.host and large and not state[0].endswith("+")  # such a tensor has no name in a program
        makers = self.makers.get(state, [])
        replays = {maker.variable: 1.0 for maker in makers if maker.variable is not None}
        stored = self.stored.get(state, {})
        s = out.kept[state] = model.variable(1.0, integer=large or bool(replays))
        there = total((1.0, self.given.get(state, {})), (1.0, stored))
        for maker in makers:
            add(there, {maker.there: 1.0})
        keeps = {s: 1.0}
        if host:
            out.hosted[state] = model.binary()
            keeps[out.hosted[state]] = 1.0
        if state in self.brought:
            # is made or given <= 1: a view and what it views are one tensor only where the view is made from it, and not where
            # its parts are gathered
            model.row(total((1.0, there)), -INFINITY, 1.0)
        # S[t] + O[t] <= is made or given in the forward
        model.row(total((1.0, there), (-1.0, keeps)), 0.0, INFINITY)
        support = total((1.0, keeps), (1.0, replays), (1.0, stored))
        a = available[state] = model.variable(1.0)
        # A[t] <= S[t] + O[t] + what makes it again + parameters as they are stored
        model.row(total((1.0, support), (-1.0, {a: 1.0})), 0.0, INFINITY)
        for terms in out.needs.get(state, {}).values():
            # A[t] >= x that needs it in its backward, for every operation
            model.at_least(a, terms)
        if large and replays and state in out.needs:
            m = out.passing[state] = model.variable(1.0)
            for terms in out.needs[state].values():
                # M[t] >= x that needs it - S[t] - O[t] - as it is stored
                model.at_least(m, total((1.0, terms), (-1.0, keeps), (-1.0, stored)))

    def _supported(self, available: Mapping[State, int]) -> None:
        """Whatever is read is there, and somewhere a family of conversions begins: they do not support each other in a cycle."""
        for state, terms in self.readers:
            if state in available:
                # A[t] >= r, c that read it
                self.model.at_least(available[state], terms)
        families = Aliases()
        for state in available:
            for maker in self.makers.get(state, ()):
                if len(maker.sources) == 1 and maker.sources[0][0] == state[0] and maker.sources[0] in available:
                    families.union(maker.sources[0], state)
        members: dict[State, list[State]] = {}
        for state in available:
            members.setdefault(families.find(state), []).append(state)
        for family in members.values():
            if len(family) < 2:
                continue
            inside = set(family)
            support: dict[int, float] = {}
            for state in family:
                add(support, {self.out.kept[state]: 1.0})
                if state in self.out.hosted:
                    add(support, {self.out.hosted[state]: 1.0})
                add(support, self.stored.get(state, {}))
                for maker in self.makers.get(state, ()):
                    if maker.variable is not None and not inside.issuperset(maker.sources):
                        support[maker.variable] = 1.0
            base = self.model.define(support)
            for state in family:
                # A[t] <= sum over its family of S + O + operations that make one of it again
                self.model.row([(base, 1.0), (available[state], -1.0)], 0.0, INFINITY)
