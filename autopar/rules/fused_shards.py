"""The dimensions that are worth sharding in parts: ``S(2,3)`` for a fused query-key-value projection that is sharded by heads.

A *part shard* (value, dim, parts) with parts > 1 arises where a view, split or grouped attention reads a dimension as a compound
of factors and its minor factor is sharded. It spreads along factors through the block, in both directions. A connected set of
part shards is offered if it reaches an operation that sums a factor (a matmul), since only there something is gained by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import sympy
from networkx.utils import UnionFind

from autopar.ir.dims import Dim, as_sympy
from autopar.ir.graph import Node
from autopar.operations.notation.notation import FactorKind, FittedRule, Term

PartShard = tuple[str, int, int]
"""A value, one of its dimensions, and the `parts` of ``Shard(dim, parts)``."""

FactorShard = tuple[str, int]
"""A factor to shard, and the number of parts in which it is viewed first."""

Shardable = Callable[[Dim, int], bool]
"""Whether a factor of this size, viewed in this many parts, may be sharded on the mesh axis at hand."""


@dataclass(frozen=True, slots=True)
class FittedNode:
    """A node with its rule fitted to its shapes. `minors`, `addends`: see `rule.DerivedLine`."""

    node: Node
    match: FittedRule
    minors: bool
    sizes: Mapping[str, Dim]
    kinds: Mapping[str, FactorKind]
    addends: tuple[int, ...] | None = None

    def tensors(self) -> Iterator[tuple[str, tuple[Term, ...]]]:
        """Every operand and result of the node, with the factors of its dimensions."""
        yield from zip(self.node.operands(), self.match.operands, strict=True)
        yield from zip((value.name for value in self.node.outputs), self.match.results, strict=True)

    def size(self, name: str) -> Dim:
        return int(name) if name.isdigit() else self.sizes[name]

    def kind(self, name: str) -> FactorKind:
        return self.kinds.get(name, FactorKind.WHOLE)


def major_parts(fitted: FittedNode, term: Term, factor: str) -> int | None:
    """The product of the factors above `factor` in a dimension; None where it depends on the batch."""
    product = 1
    for name in term:
        if name == factor:
            return product
        size = fitted.size(name)
        if not isinstance(size, int):
            return None
        product *= size
    raise AssertionError(f"{factor} is not in {term}")


@lru_cache(maxsize=65536)
def divides_evenly(size: Dim, parts: int) -> bool:
    """Return whether `parts` divides the size, for every batch."""
    if isinstance(size, int):
        return size % parts == 0
    polynomial = sympy.Poly(as_sympy(size), *sorted(as_sympy(size).free_symbols, key=str))
    return all(coefficient.is_Integer and coefficient % parts == 0 for coefficient in polynomial.coeffs())


def sharded_dims(fitted: FittedNode, shard: FactorShard) -> list[PartShard] | None:
    """The dimensions of the node's tensors that `shard` makes sharded; None where a `Shard` cannot express it."""
    factor, parts = shard
    out: list[PartShard] = []
    for name, terms in fitted.tensors():
        for dim, term in enumerate(terms):
            if factor in term:
                above = major_parts(fitted, term, factor)
                if above is None:
                    return None
                out.append((name, dim, above * parts))
    return out


def is_legal(fitted: FittedNode, shard: FactorShard, shardable: Shardable) -> bool:
    """Return whether this node alone allows the shard."""
    factor, parts = shard
    if fitted.kind(factor) is FactorKind.WHOLE or not divides_evenly(fitted.sizes[factor], parts):
        return False
    if not shardable(fitted.sizes[factor], parts) or sharded_dims(fitted, shard) is None:
        return False
    return fitted.minors or not any(
        shardable(fitted.sizes[major], 1)
        for _, terms in fitted.tensors()
        for term in terms
        if factor in term
        for major in term[: term.index(factor)]
        if fitted.kind(major) is not FactorKind.WHOLE
    )


def shards_of_term(fitted: FittedNode, term: Term, parts: int, shardable: Shardable) -> Iterator[FactorShard]:
    """The shards of a node that make a dimension of these factors ``S(dim, parts)``."""
    for factor in term:
        if factor.isdigit():
            continue
        above = major_parts(fitted, term, factor)
        if above is not None and parts % above == 0:
            shard = (factor, parts // above)
            if is_legal(fitted, shard, shardable):
                yield shard


def useful_shards(nodes: Iterable[FittedNode], shardable: Shardable, keep_all: bool = False) -> dict[str, list[FactorShard]]:
    """Every shard worth offering, by node name; with `keep_all` also those that reach no matmul."""
    fitted = list(nodes)
    users: dict[str, list[FittedNode]] = defaultdict(list)
    for item in fitted:
        for name in dict.fromkeys(name for name, _ in item.tensors()):
            users[name].append(item)
    connected = UnionFind()
    part_shards: dict[tuple[str, FactorShard], list[PartShard]] = {}
    plain = ((item, (name, 1)) for item in fitted for name in item.sizes)
    pending = [(item, shard) for item, shard in plain if is_legal(item, shard, shardable)]
    while pending:
        item, shard = pending.pop()
        if (item.node.name, shard) in part_shards:
            continue
        found = [each for each in sharded_dims(item, shard) or [] if each[2] > 1]
        part_shards[item.node.name, shard] = found
        connected.union(*found)
        for each in found:
            pending += _spread(each, users, shardable)
    sums = {item.node.name for item in fitted if FactorKind.SUMMED in item.kinds.values()}
    useful = {connected[found[0]] for (name, _), found in part_shards.items() if found and (keep_all or name in sums)}
    order = {item.node.name: {factor: index for index, factor in enumerate(item.sizes)} for item in fitted}
    out: dict[str, list[FactorShard]] = {item.node.name: [] for item in fitted}
    for (name, shard), found in part_shards.items():
        if not found or connected[found[0]] in useful:
            out[name].append(shard)
    return {name: sorted(found, key=partial(_rank, order[name])) for name, found in out.items()}


def _rank(order: Mapping[str, int], shard: FactorShard) -> tuple[int, int]:
    return order[shard[0]], shard[1]


def _spread(
    part_shard: PartShard, users: Mapping[str, list[FittedNode]], shardable: Shardable
) -> Iterator[tuple[FittedNode, FactorShard]]:
    """The shards of all nodes that read or produce the value and make it sharded in the same way."""
    value, dim, parts = part_shard
    for item in users[value]:
        for name, terms in item.tensors():
            if name == value:
                for shard in shards_of_term(item, terms[dim], parts, shardable):
                    yield item, shard
