"""The runs of nodes that become blocks: layers at every depth of the module tree.

The elements of lists of layers are blocks: those of the outermost lists always, those of lists inside of them (the bottlenecks of
a stage, the transformer layers of a U-Net's attention block) where equal ones make the distinct blocks of the whole smaller. A
module that is called several times is one block with as many calls. What lies between is a block of its own, relative to the
module around it, so that it is equal where these modules are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from autopar.ir.graph import Node

CALL_MARK = "@call"
"""The mark in module paths of the flat graph before the number of the module's call, from the second one on
(``encoder@call1.layers.0``)."""

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Modules whose elements may be layers."""

MOST_DISTINCT = 0.75
"""A block is taken apart where the distinct ones of its parts have at most this share of its nodes."""

FEWEST_NODES = 8
"""Fewer nodes are no layer inside of a layer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive nodes ``start <= i < end`` of the module call at `path` (with call marks; empty: of the model). `whole` where
    they are the whole call, not what lies between its layers; `around` is the path of the span that it is a part of."""

    path: str
    start: int
    end: int
    whole: bool
    around: str = ""


def without_marks(path: str) -> str:
    """A module path of the flat graph as the user's model has it."""
    return re.sub(rf"{CALL_MARK}\d+", "", path) if CALL_MARK in path else path


def layer_lists(model: nn.Module) -> frozenset[str]:
    """The module paths of elements of ModuleLists, and of Sequentials and ModuleDicts that repeat a class; no leaf modules."""
    found: list[str] = []
    for path, module in model.named_modules():
        children = list(module.children()) if isinstance(module, CONTAINERS) else []
        kinds = [type(child) for child in children]
        compound = bool(children) and all(any(True for _ in child.children()) for child in children)
        repeated = isinstance(module, nn.ModuleList) or len(set(kinds)) < len(kinds)
        if compound and repeated:
            found.extend(f"{path}.{name}" if path else name for name, _ in module.named_children())
    return frozenset(found)


def called_repeatedly(model: nn.Module, nodes: Iterable[Node]) -> frozenset[str]:
    """The module paths of modules with submodules that are called several times."""
    marked = {node.module for node in nodes if CALL_MARK in node.module}
    paths = {
        without_marks(".".join(parts[: length + 1]))
        for parts in (path.split(".") for path in marked)
        for length, part in enumerate(parts)
        if CALL_MARK in part
    }
    return frozenset(path for path in paths if any(True for _ in model.get_submodule(path).children()))


class Spans:
    """Takes the nodes of a flat graph apart. `fingerprint` tells equal spans."""

    def __init__(self, nodes: Sequence[Node], layers: frozenset[str], fingerprint: Callable[[Span], Hashable]) -> None:
        self.nodes, self.layers, self.fingerprint = nodes, layers, fingerprint
        self._heads: dict[str, tuple[str, ...]] = {}

    def chosen(self) -> list[Span]:
        """The spans of all blocks, in order: first what is smaller by its own equal parts, then what is by those of others."""
        spans = [
            part
            for span in self.split(Span("", 0, len(self.nodes), True)) or [Span("", 0, len(self.nodes), True)]
            for part in (self.parts(span) if span.whole and span.path else [span])
        ]
        while (better := self._sharing(spans)) is not None:
            spans = better
        return self._joined(spans)

    def parts(self, span: Span) -> list[Span]:
        """A layer as the parts that make it smaller, or as it is."""
        within = self._spans_within(span)
        if not within or self._distinct(within, frozenset()) > MOST_DISTINCT * _size(span):
            return [span]
        return within

    def _spans_within(self, span: Span) -> list[Span]:
        return [part for each in self.split(span) for part in (self.parts(each) if each.whole else [each])]

    def _distinct(self, within: Sequence[Span], known: frozenset[Hashable]) -> int:
        """Nodes of the distinct ones that are not known."""
        return sum({self.fingerprint(each): _size(each) for each in within if self.fingerprint(each) not in known}.values())

    def _sharing(self, spans: Sequence[Span]) -> list[Span] | None:
        """Return the spans with one kind of layer taken apart, since enough of its parts are blocks anyway; None where there is
        none."""
        known = Counter(self.fingerprint(span) for span in spans)
        tried: set[Hashable] = set()
        for span in spans:
            key = self.fingerprint(span)
            if not span.whole or key in tried:
                continue
            tried.add(key)
            within = self._spans_within(span)
            if within and self._distinct(within, frozenset(known)) <= MOST_DISTINCT * _size(span):
                return [
                    part
                    for each in spans
                    for part in (self._spans_within(each) if each.whole and self.fingerprint(each) == key else [each])
                ]
        return None

    def _joined(self, spans: Sequence[Span]) -> list[Span]:
        """Neighbours inside of one layer that are equal to nothing else are one block."""
        known = Counter(self.fingerprint(span) for span in spans)
        out: list[Span] = []
        joinable = ""
        for span in spans:
            alone = span.around if known[self.fingerprint(span)] == 1 else ""
            if alone and alone == joinable:
                out[-1] = Span(alone, out[-1].start, span.end, False, alone)
            else:
                out.append(span)
            joinable = alone
        return out

    def split(self, span: Span) -> list[Span]:
        """The outermost layers inside of a span, and what lies between them; empty where there are none. A layer whose nodes are
        in several runs is none."""
        refused: set[str] = set()
        while True:
            runs: list[Span] = []
            for index in range(span.start, span.end):
                head = self._owner(self.nodes[index].module, span.path, refused)
                if runs and runs[-1].path == (head or span.path):
                    runs[-1] = Span(runs[-1].path, runs[-1].start, index + 1, bool(head), span.path)
                else:
                    runs.append(Span(head or span.path, index, index + 1, bool(head), span.path))
            counts = Counter(run.path for run in runs if run.whole)
            small = FEWEST_NODES if span.path else 0
            several = {run.path for run in runs if run.whole and (counts[run.path] > 1 or _size(run) < small)}
            if not several:
                return runs if counts else []
            refused |= several

    def _owner(self, module: str, inside: str, refused: set[str]) -> str:
        """The outermost layer inside of a module call that a node of `module` belongs to."""
        if module not in self._heads:
            parts = module.split(".")
            heads = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            self._heads[module] = tuple(head for head in heads if without_marks(head) in self.layers)
        depth = len(inside)
        return next((head for head in self._heads[module] if len(head) > depth and head not in refused), "")


def _size(span: Span) -> int:
    return span.end - span.start
