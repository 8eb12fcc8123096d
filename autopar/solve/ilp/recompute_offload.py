"""Recomputation and offloading in the ILP: per storage, whether it is saved on the device (whole, or in parts, see `storages`),
offloaded or recomputed.

``S[t]`` storage t is saved on the device, ``O[t]`` offloaded to host memory, ``A[t]`` available in the backward, ``M[t]``
recomputed for it; ``r[o, s]`` operation o is recomputed under strategy s, ``c[e]`` a conversion is recomputed. Given strategies,
conversions, S and O, the rest is determined, so only S and O are integers. Tensors are told apart by storage (`tensors.aliases`):
views and conversions without communication need no variables. Storages below a thousandth of a block's bytes are saved, unless
what produces them is recomputed anyway. (The optimizer's state: `solve.space.force`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from networkx.utils import UnionFind

from autopar.cost_models.step.block_memory import saved_storages
from autopar.cost_models.step.recompute import overwritten_values, recomputable_nodes
from autopar.cost_models.tensors.sizes import PlacedValue
from autopar.ir.graph import Node
from autopar.operations.losses import runs_in_chunks
from autopar.operations.table import operation
from autopar.solve.ilp.formulation import Expression, Formulation, StorageVariables
from autopar.solve.ilp.linear_model import INFINITY, add, total
from autopar.solve.ilp.storages import add_partition, boundary_values, partition_axes, storage_names
from autopar.solve.problem.problem import BlockTable, NodeStrategy

_MIN_SHARE = 1e-3
"""Storages below this share of all that a block could save are not worth a decision."""


def add_storages(form: Formulation, name: str, table: BlockTable, decide: bool, offloads: bool = True) -> None:
    """Add the variables and rows of one block. Without `decide` all that the backward needs is saved, without `offloads` nothing
    is offloaded."""
    out = StorageVariables(storage_names(table))
    form.storages[name] = out
    for node, strategies in table.strategies.items():
        for strategy, x in zip(strategies, form.x[name, node], strict=True):
            for storage, size in saved_storages(table.costs, out.same, strategy.plan):
                if size:
                    out.needs.setdefault(storage, {}).setdefault(node, {})[x] = 1.0
                    out.sizes[storage] = size / form.byte_unit
    if decide:
        _BlockRecompute(form, name, table, out, offloads).add()
    else:
        _save_everything(form, out)


def small_size(sizes: Mapping[PlacedValue, float]) -> float:
    """Storages that are not larger are saved without a decision; `sizes` of what operations save for their backward."""
    least: dict[str, float] = {}
    for storage, size in sizes.items():
        name, _, extra = storage[0].partition(" ")  # of what is saved beside operands in any amount
        value = f"{name}+" if extra else name
        least[value] = min(least.get(value, INFINITY), size)
    return _MIN_SHARE * sum(least.values())


def _save_everything(form: Formulation, out: StorageVariables) -> None:
    for storage, by_node in out.needs.items():
        saved = out.saved[storage] = form.model.variable(1.0)
        for terms in by_node.values():
            # S[t] >= x that needs it, for every operation
            form.model.at_least(saved, terms)


@dataclass(frozen=True, slots=True)
class _Producer:
    """An operation or conversion that produces a storage: its x or y, the storages that it reads, and its r or c, None where it
    cannot be recomputed."""

    produced: int
    sources: tuple[PlacedValue, ...]
    recompute: int | None


class _BlockRecompute:
    """The decisions of one block.

    given, stored: per storage the w under which it is an input, or a parameter as it is stored. producers: per storage.
    converted: storages that a conversion brings a value to without naming them. readers: (storage, r or c that read it).
    """

    def __init__(self, form: Formulation, name: str, table: BlockTable, out: StorageVariables, offloads: bool) -> None:
        self.form, self.name, self.table, self.out = form, name, table, out
        self.model, self.find = form.model, out.same.find
        self.given: dict[PlacedValue, Expression] = {}
        self.stored: dict[PlacedValue, Expression] = {}
        for slot, value, at, w in boundary_values(form, table):
            if slot.side != "out":
                add((self.stored if slot.side == "param" else self.given).setdefault(self.find((value, at)), {}), w)
        self.producers: dict[PlacedValue, list[_Producer]] = {}
        self.converted: set[PlacedValue] = set()
        self.readers: list[tuple[PlacedValue, Expression]] = []
        self.small = small_size(out.sizes)
        self.has_host, self.offloads = form.problem.cluster.host is not None, offloads
        self.partition_axes = partition_axes(form.problem, table)

    def add(self) -> None:
        """Add all variables and rows."""
        self._add_recomputed_operations()
        self._add_recomputed_conversions()
        available: dict[PlacedValue, int] = {}
        for storage in self._needed_storages():
            available[storage] = self._add_storage(storage)
        self._add_reads(available)
        self._add_families(available)

    def _large(self, storage: PlacedValue) -> bool:
        """Note the size of a storage, and return whether it is worth a decision."""
        sizes = self.out.sizes
        if storage not in sizes:
            sizes[storage] = 0.0 if storage[0].endswith("+") else self.table.costs.value_bytes(*storage) / self.form.byte_unit
        return sizes[storage] > self.small

    def _add_recomputed_operations(self) -> None:
        """Add r: which operations are recomputed."""
        recomputable = recomputable_nodes(self.table.block)
        nodes = self.table.costs.nodes
        for name, strategies in self.table.strategies.items():
            node = nodes[name]
            if operation(node.op).view and node.operands():
                continue
            reads: dict[tuple[int, PlacedValue], Expression] = {}
            for strategy, x in zip(strategies, self.form.x[self.name, name], strict=True):
                reading = [self.find(state) for state in zip(node.operands(), strategy.plan.operands, strict=True)]
                sources = tuple(dict.fromkeys(reading))
                targets = self._results(node, strategy)
                large = [target for target in targets if self._large(target)]
                again = name in recomputable and large and not runs_in_chunks(strategy.plan.function)
                r = self.model.variable(1.0) if again else None
                for target in targets:
                    self.producers.setdefault(target, []).append(_Producer(x, sources, r))
                if r is None:
                    continue
                # r[o, s] <= x[o, s]
                self.model.row([(x, 1.0), (r, -1.0)], 0.0, INFINITY)
                self.out.seconds.append((r, strategy.seconds.recompute))
                for index, storage in enumerate(reading):
                    reads.setdefault((index, storage), {})[r] = 1.0
            self.readers += [(storage, terms) for (_, storage), terms in reads.items()]

    def _results(self, node: Node, strategy: NodeStrategy) -> dict[PlacedValue, None]:
        """The storages that the operation produces: its results, and what it saves beside them."""
        names = dict.fromkeys(self.find((value.name, at)) for value, at in zip(node.outputs, strategy.plan.results, strict=True))
        every = (storage for storage, _ in saved_storages(self.table.costs, self.out.same, strategy.plan))
        return names | dict.fromkeys(storage for storage in every if storage[0].endswith("+"))

    def _add_recomputed_conversions(self) -> None:
        """Add c: which conversions are recomputed."""
        overwritten = overwritten_values(self.table.block)
        for value, conversions in self.table.conversions.items():
            if value in overwritten:
                continue
            for edge, y in zip(conversions.edges, self.form.y[self.name, value], strict=True):
                before, after = (value, conversions.states[edge.source]), (value, conversions.states[edge.target])
                source, target = self.find(before), self.find(after)
                if source == target:
                    continue
                if target != after:
                    self.converted.add(target)
                c = self.model.variable(1.0) if self._large(target) else None
                self.producers.setdefault(target, []).append(_Producer(y, (source,), c))
                if c is None:
                    continue
                # c[e] <= y[e]
                self.model.row([(y, 1.0), (c, -1.0)], 0.0, INFINITY)
                self.out.seconds.append((c, edge.seconds.recompute))
                self.readers.append((source, {c: 1.0}))

    def _needed_storages(self) -> dict[PlacedValue, None]:
        """Return what some backward needs, and what that may be recomputed from."""
        needed = dict.fromkeys(self.out.needs)
        pending = list(needed)
        while pending:
            for producer in self.producers.get(pending.pop(), ()):
                if producer.recompute is None:
                    continue
                for source in producer.sources:
                    if source not in needed:
                        needed[source] = None
                        pending.append(source)
        return needed

    def _add_storage(self, storage: PlacedValue) -> int:
        """Add S, O, P, M and A of a storage, and return A."""
        model, out, large = self.model, self.out, self._large(storage)
        may_offload = self.has_host and large and not storage[0].endswith("+")  # such a tensor has no name in a program
        producers = self.producers.get(storage, [])
        recomputed = {each.recompute: 1.0 for each in producers if each.recompute is not None}
        stored = self.stored.get(storage, {})
        saved = out.saved[storage] = model.variable(1.0, integer=large or bool(recomputed))
        exists = total((1.0, self.given.get(storage, {})), (1.0, stored))
        for producer in producers:
            add(exists, {producer.produced: 1.0})
        saved_or_offloaded = {saved: 1.0}
        if may_offload:
            out.offloaded[storage] = model.variable(float(self.offloads), integer=True)
            saved_or_offloaded[out.offloaded[storage]] = 1.0
        axes = self.partition_axes.get(storage[0], ()) if large else ()
        saved_or_offloaded |= add_partition(self.form, self.table, out, storage, axes, self.given.get(storage, {}))
        if storage in self.converted:
            # produced or given <= 1: a view shares the storage of its base only where it is made from it, not where a conversion
            # produces it
            model.row(total((1.0, exists)), -INFINITY, 1.0)
        # S[t] + O[t] + P[t] <= produced or given in the forward
        model.row(total((1.0, exists), (-1.0, saved_or_offloaded)), 0.0, INFINITY)
        support = total((1.0, saved_or_offloaded), (1.0, recomputed), (1.0, stored))
        available = model.variable(1.0)
        # A[t] <= S[t] + O[t] + P[t] + r, c that produce it + parameters as they are stored
        model.row(total((1.0, support), (-1.0, {available: 1.0})), 0.0, INFINITY)
        for terms in out.needs.get(storage, {}).values():
            # A[t] >= x that needs it in its backward, for every operation
            model.at_least(available, terms)
        if large and recomputed and storage in out.needs:
            m = out.recomputed[storage] = model.variable(1.0)
            for terms in out.needs[storage].values():
                # M[t] >= x that needs it - S[t] - O[t] - P[t] - as it is stored
                model.at_least(m, total((1.0, terms), (-1.0, saved_or_offloaded), (-1.0, stored)))
        return available

    def _add_reads(self, available: Mapping[PlacedValue, int]) -> None:
        """Add the rows by which whatever is recomputed reads what is available."""
        for storage, terms in self.readers:
            if storage in available:
                # A[t] >= r, c that read it
                self.model.at_least(available[storage], terms)

    def _add_families(self, available: Mapping[PlacedValue, int]) -> None:
        """Add rows by which storages that conversions produce from each other (a family) do not support each other."""
        joined = UnionFind()
        for storage in available:
            for producer in self.producers.get(storage, ()):
                if len(producer.sources) == 1 and producer.sources[0][0] == storage[0] and producer.sources[0] in available:
                    joined.union(producer.sources[0], storage)
        families: dict[PlacedValue, list[PlacedValue]] = {}
        for storage in available:
            families.setdefault(joined[storage], []).append(storage)
        for family in families.values():
            if len(family) > 1:
                self._add_family(family, available)

    def _add_family(self, family: list[PlacedValue], available: Mapping[PlacedValue, int]) -> None:
        inside = set(family)
        support: Expression = {}
        for storage in family:
            add(support, {self.out.saved[storage]: 1.0})
            if storage in self.out.offloaded:
                add(support, {self.out.offloaded[storage]: 1.0})
            for axis in self.partition_axes.get(storage[0], ()):
                add(support, {p: 1.0 for p in [self.out.partitioned.get((storage, axis))] if p is not None})
            add(support, self.stored.get(storage, {}))
            for producer in self.producers.get(storage, ()):
                if producer.recompute is not None and not inside.issuperset(producer.sources):
                    support[producer.recompute] = 1.0
        base = self.model.define(support)
        for storage in family:
            # A[t] <= sum over its family of S + O + P + r of operations that produce one of it
            self.model.row([(base, 1.0), (available[storage], -1.0)], 0.0, INFINITY)
