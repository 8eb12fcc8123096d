"""Which dimensions are worth cutting in parts: ``S(2,3)`` for a fused query-key-value projection.

A *state* (value, dim, parts) with parts > 1 is wanted where a view, split or grouped attention reads a dimension as a compound
and its minor factor is cut. It spreads along factors through the block, both ways; a connected set of states is kept if it
reaches an operation that sums a factor (a matmul), since only there something is gained by never gathering it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import sympy

from autopar.ir.dims import Dim, expression
from autopar.ir.graph import Node
from autopar.rules.notation import Match, Term

State = tuple[str, int, int]
Cut = tuple[str, int]
"""A factor and in how many parts it is read."""

Shardable = Callable[[Dim, int], bool]
"""Whether a factor of this size, read in this many parts, may be cut on the axis at hand."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A node with its line fitted. `minors`, `addends`: see `rule.Derived`."""

    node: Node
    match: Match
    minors: bool
    sizes: Mapping[str, Dim]
    marks: Mapping[str, str]
    addends: tuple[int, ...] | None = None

    def tensors(self) -> Iterator[tuple[str, tuple[Term, ...]]]:
        """Every tensor of the node with the factors of its dimensions."""
        yield from zip(self.node.operands(), self.match.operands, strict=True)
        yield from zip((value.name for value in self.node.outputs), self.match.results, strict=True)

    def size(self, name: str) -> Dim:
        return int(name) if name.isdigit() else self.sizes[name]


def majors(fitted: Fitted, term: Term, factor: str) -> int | None:
    """How many parts a dimension has above `factor`; None where that depends on the batch."""
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
def reads_in(size: Dim, parts: int) -> bool:
    """Whether a size is `parts` times a whole number, for every batch."""
    if isinstance(size, int):
        return size % parts == 0
    polynomial = sympy.Poly(expression(size), *sorted(expression(size).free_symbols, key=str))
    return all(coefficient.is_Integer and coefficient % parts == 0 for coefficient in polynomial.coeffs())


def places(fitted: Fitted, cut: Cut) -> list[State] | None:
    """Where the factor of `cut` is in the node's tensors; None where that is not expressible."""
    factor, parts = cut
    out: list[State] = []
    for name, terms in fitted.tensors():
        for dim, term in enumerate(terms):
            if factor in term:
                above = majors(fitted, term, factor)
                if above is None:
                    return None
                out.append((name, dim, above * parts))
    return out


def legal(fitted: Fitted, cut: Cut, shardable: Shardable) -> bool:
    """Whether the cut may be made at this node, on its own."""
    factor, parts = cut
    if fitted.marks.get(factor, "!") == "!" or not reads_in(fitted.sizes[factor], parts):
        return False
    if not shardable(fitted.sizes[factor], parts) or places(fitted, cut) is None:
        return False
    return fitted.minors or not any(
        shardable(fitted.sizes[major], 1)
        for _, terms in fitted.tensors()
        for term in terms
        if factor in term
        for major in term[: term.index(factor)]
        if fitted.marks.get(major, "!") != "!"
    )


def cuts_at(fitted: Fitted, term: Term, parts: int, shardable: Shardable) -> Iterator[Cut]:
    """The cuts of a node that make a dimension with this term ``S(dim, parts)``."""
    for factor in term:
        if factor.isdigit():
            continue
        above = majors(fitted, term, factor)
        if above is not None and parts % above == 0:
            cut = (factor, parts // above)
            if legal(fitted, cut, shardable):
                yield cut


def cuts(nodes: Iterable[Fitted], shardable: Shardable, keep_all: bool = False) -> dict[str, list[Cut]]:
    """Every cut worth offering, by node name; with `keep_all` also those that reach no matmul."""
    fitted = list(nodes)
    plain = {
        item.node.name: [cut for cut in ((name, 1) for name in item.sizes) if legal(item, cut, shardable)] for item in fitted
    }
    users: dict[str, list[Fitted]] = defaultdict(list)
    for item in fitted:
        for name in dict.fromkeys(name for name, _ in item.tensors()):
            users[name].append(item)
    joined = _Sets()
    edges: dict[tuple[str, Cut], list[State]] = {}
    waiting = [(item, cut) for item in fitted for cut in plain[item.node.name]]
    while waiting:
        item, cut = waiting.pop()
        if (item.node.name, cut) in edges:
            continue
        found = [state for state in places(item, cut) or [] if state[2] > 1]
        edges[item.node.name, cut] = found
        for state in found:
            joined.join(found[0], state)
            waiting += _spread(state, users, shardable)
    sums = {item.node.name for item in fitted if "+" in item.marks.values()}
    useful = {joined.root(found[0]) for (name, _), found in edges.items() if found and (keep_all or name in sums)}
    order = {item.node.name: {factor: index for index, factor in enumerate(item.sizes)} for item in fitted}
    out: dict[str, list[Cut]] = {item.node.name: [] for item in fitted}
    for (name, cut), found in edges.items():
        if not found or joined.root(found[0]) in useful:
            out[name].append(cut)
    return {name: sorted(found, key=partial(_rank, order[name])) for name, found in out.items()}


def _rank(order: Mapping[str, int], cut: Cut) -> tuple[int, int]:
    return order[cut[0]], cut[1]


def _spread(state: State, users: Mapping[str, list[Fitted]], shardable: Shardable) -> Iterator[tuple[Fitted, Cut]]:
    value, dim, parts = state
    for item in users[value]:
        for name, terms in item.tensors():
            if name == value:
                for cut in cuts_at(item, terms[dim], parts, shardable):
                    yield item, cut


class _Sets:
    """Disjoint sets of states."""

    def __init__(self) -> None:
        self._up: dict[State, State] = {}

    def root(self, state: State) -> State:
        while (up := self._up.get(state, state)) != state:
            self._up[state] = self._up.get(up, up)
            state = up
        return state

    def join(self, a: State, b: State) -> None:
        self._up[self.root(a)] = self.root(b)
