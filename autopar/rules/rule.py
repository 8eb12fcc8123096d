"""How one operation may be sharded: its line, where it is linear, and the programs that replace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Node, Ref
from autopar.ir.placement import Placement
from autopar.rules.notation import Line, Match, fit, parse
from autopar.rules.strategy import InnerCollective


def argument(node: Node, index: int, name: str, default: Arg = None) -> Arg:
    """An argument by position or by name."""
    if index < len(node.args):
        return node.args[index]
    return dict(node.kwargs).get(name, default)


@dataclass(frozen=True, slots=True)
class Derived:
    """A line that depends on the operation's shapes and arguments.

    `sizes` gives factor sizes that shapes do not tell. `minors` also shards a minor factor of a compound whose major could be
    sharded instead (query heads within a group). `addends`: the operands that are added once beside what a factor sums (a bias),
    by index; None: as `Rule.addends` says.
    """

    line: str
    sizes: tuple[tuple[str, Dim], ...] = ()
    minors: bool = False
    addends: tuple[int, ...] | None = None


Derive = Callable[[Node, tuple[Shape, ...]], Derived | None]
"""From a node and its operands' global shapes to its line; None where the form at hand has none."""


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """The program that runs where one axis cuts `factor`, and all factors of `also` with it. `result` overrides the results'
    placement (None: as the line says).

    A factor marked ``!`` may be cut by a function that names it. ``...`` stands for each leading factor in turn. `line` reads the
    operation otherwise than its rule does (heads of which some share keys, say). `applies`: whether this node may be computed so
    (None: always). `collectives` tells what it communicates, from the node and its operands' global shapes. `uneven` tells how
    much more than the mean the busiest of so many ranks computes.
    """

    factor: str
    name: str
    result: Placement | None = None
    collectives: Callable[[Node, tuple[Shape, ...]], tuple[InnerCollective, ...]] | None = None
    also: tuple[str, ...] = ()
    line: Derive | None = None
    applies: Callable[[Node, tuple[Shape, ...]], bool] | None = None
    alone: bool = False
    """Whether no other axis may cut the dimensions that this one cuts."""
    uneven: Callable[[Node, tuple[Shape, ...], int], float] | None = None

    def fits(self, node: Node, shapes: tuple[Shape, ...]) -> bool:
        """Whether the node may be computed by this function."""
        return self.applies is None or self.applies(node, shapes)


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operation may be sharded.

    `passes` are sets of operands in which it is linear together: all of them `Partial`, the others `Replicate`, gives Partial.
    (``(0, 1)`` for a sum, ``(0,), (1,)`` for a product; ``"all"`` for all operands together.)
    """

    line: str | Derive
    passes: tuple[tuple[int, ...] | str, ...] = ()
    functions: tuple[NamedFunction, ...] = ()
    registered: bool = False
    """Whether a user gave it: then it must fit."""
    addends: bool = True
    """Whether floating operands without a summed factor are addends (a bias), else they are factors of every term."""

    def derived(self, node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
        return Derived(self.line) if isinstance(self.line, str) else self.line(node, shapes)


def match(rule: Rule, node: Node, shapes: tuple[Shape, ...]) -> tuple[Match, Derived] | None:
    """The rule's line fitted to a node; None where it has none for this form. ValueError where it does not fit."""
    derived = rule.derived(node, shapes)
    if derived is None:
        return None
    line = parse(derived.line)
    if isinstance(rule.line, str):
        line = _without_absent(line, node)
    return fitted(line, derived, node, shapes), derived


def fitted(line: Line, derived: Derived, node: Node, shapes: tuple[Shape, ...]) -> Match:
    """The line fitted to a node's shapes. ValueError where it does not fit."""
    results = tuple(value.shape for value in node.outputs)
    if len(line.operands) != len(shapes) or len(line.results) != len(results):
        raise ValueError(f"rule {derived.line!r} of {node.op} does not fit its {len(shapes)} operands and {len(results)} results")
    return fit(line, shapes, results, dict(derived.sizes))


def _without_absent(line: Line, node: Node) -> Line:
    """The line without the operands that this node leaves out (None, or not given)."""
    present: list[bool] = []
    for arg in (*node.args, *(arg for _, arg in node.kwargs)):
        if len(present) < len(line.operands) and (arg is None or isinstance(arg, Ref)):
            present.append(arg is not None)
        elif isinstance(arg, tuple):
            present += [True] * _count(arg)
    kept = [spec for spec, there in zip(line.operands, present, strict=False) if there]
    return replace(line, operands=tuple(kept))


def _count(arg: Sequence[object]) -> int:
    return sum(isinstance(item, Ref) for item in arg)
