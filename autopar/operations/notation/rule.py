"""A sharding rule: the line of factor notation of an operation, the operands in which it is linear, and the named functions that
compute it where the operation itself cannot run on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Node, Ref
from autopar.ir.placement import Placement
from autopar.operations.notation.notation import FittedRule, RuleLine, fit_rule, parse_rule


def argument(node: Node, index: int, name: str, default: Arg = None) -> Arg:
    """An argument of a node, by position or by name."""
    if index < len(node.args):
        return node.args[index]
    return dict(node.kwargs).get(name, default)


@dataclass(frozen=True, slots=True)
class DerivedLine:
    """The line of one node, written from its shapes and arguments.

    `sizes` are sizes of factors that the shapes do not tell. With `minors` a minor factor of a compound may be sharded also where
    its major could be (query heads within a group). `addends` are the indices of the operands that are added once to the sum over
    a factor (a bias); None: as `Rule.addends` says.
    """

    line: str
    sizes: tuple[tuple[str, Dim], ...] = ()
    minors: bool = False
    addends: tuple[int, ...] | None = None


Derive = Callable[[Node, tuple[Shape, ...]], DerivedLine | None]
"""Writes the line of a node from its operands' global shapes; None where this form of the operation has no line."""


@dataclass(frozen=True, slots=True)
class OperationCollective:
    """A collective inside of a named function, on the function's axis. `shape` is the global shape of the tensor that it moves.

    `kind` is ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``point_to_point`` (a message to a neighbour,
    of `shape`); `backward`: it runs in the backward.
    `group` is the number of neighbours on the axis that communicate with each other (0: all). With `tokens`, ranks of other axes
    that shard the tokens are neighbours too. `copies` of a token to ranks of one node are sent once.
    `operand` is the operand that it moves: other axes divide the bytes where they shard that operand (-1: where they shard any).
    `factor`: it is on the axes that shard this factor (empty: the function's own).
    `overlapped`: it overlaps with the computation of the function, one block of the axis at a time (ring attention).
    """

    kind: str
    shape: Shape
    dtype: str
    backward: bool = False
    group: int = 0
    tokens: bool = False
    copies: int = 1
    overlapped: bool = False
    operand: int = -1
    factor: str = ""


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that replaces the operation where one axis shards `factor`, and with it all factors of `also`.

    It may shard a factor of kind ``!``. ``...`` stands for each leading factor in turn. `result` is the placement of the results
    (None: as the line says). `line` replaces the line of the rule (some heads share keys, say). `applies` says whether it can
    compute a node (None: any). `collectives` are what it communicates, from the node and its operands' global shapes.
    `imbalance` is the work of the busiest of so many ranks over the mean.
    """

    factor: str
    name: str
    result: Placement | None = None
    collectives: Callable[[Node, tuple[Shape, ...]], tuple[OperationCollective, ...]] | None = None
    also: tuple[str, ...] = ()
    line: Derive | None = None
    applies: Callable[[Node, tuple[Shape, ...]], bool] | None = None
    exclusive: bool = False
    """True where no other axis may shard the dimensions that this one shards."""
    imbalance: Callable[[Node, tuple[Shape, ...], int], float] | None = None

    most_ranks: Callable[[Node, tuple[Shape, ...]], int] | None = None
    """The largest number of ranks that it can run on (None: on any number): a halo is no larger than a neighbour's shard."""

    at: tuple[int, int | None] = (0, -1)
    """The operand, and the dimension of it, that are sharded on its mesh axis. None: any dimension but the first two, of an image
    ``[n, c, ...]``; the call names it."""
    rewrite: Callable[[Node, str], Node] | None = None
    """Writes its arguments, from the node and the mesh axis (None: those of the operation, and ``axis``)."""
    pads: bool = False
    """Whether it holds a padded copy of its first operand while it runs."""
    in_place: bool = False
    """Whether its backward makes the gradient in the storage of what it saved."""
    uneven: bool = False
    """Whether the shards of its ranks may have unequal sizes (`AxisHandle.span`)."""

    def fits(self, node: Node, shapes: tuple[Shape, ...]) -> bool:
        """Return whether the function can compute the node."""
        return self.applies is None or self.applies(node, shapes)


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which an operation may be sharded.

    `linear_in` are sets of operands in which it is jointly linear: with these `Partial` and all others `Replicate`, the results
    are Partial. (``(0, 1)`` for a sum, ``(0,), (1,)`` for a product; ``"all"`` for all operands together, ``"first"`` for the
    operand that is the first argument, and no number.)
    """

    line: str | Derive
    linear_in: tuple[tuple[int, ...] | str, ...] = ()
    functions: tuple[NamedFunction, ...] = ()
    registered: bool = False
    """Whether a user registered it: then it must fit."""
    addends: bool = True
    """Whether floating-point operands without the summed factor are addends (a bias); else they are factors of every summand."""

    def derived(self, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
        return DerivedLine(self.line) if isinstance(self.line, str) else self.line(node, shapes)


def match_rule(rule: Rule, node: Node, shapes: tuple[Shape, ...]) -> tuple[FittedRule, DerivedLine] | None:
    """The rule's line fitted to a node; None where the rule has none for this form. ValueError where it does not fit."""
    derived = rule.derived(node, shapes)
    if derived is None:
        return None
    line = parse_rule(derived.line)
    if isinstance(rule.line, str):
        line = _without_absent(line, node)
    return fit_to_node(line, derived, node, shapes), derived


def fit_to_node(line: RuleLine, derived: DerivedLine, node: Node, shapes: tuple[Shape, ...]) -> FittedRule:
    """The line fitted to the shapes of a node. ValueError where it does not fit."""
    results = tuple(value.shape for value in node.outputs)
    if len(line.operands) != len(shapes) or len(line.results) != len(results):
        raise ValueError(f"rule {derived.line!r} of {node.op} does not fit its {len(shapes)} operands and {len(results)} results")
    return fit_rule(line, shapes, results, dict(derived.sizes))


def _without_absent(line: RuleLine, node: Node) -> RuleLine:
    """The line without the optional operands that this node leaves out."""
    present: list[bool] = []
    for arg in (*node.args, *(arg for _, arg in node.kwargs)):
        if len(present) < len(line.operands) and (arg is None or isinstance(arg, Ref)):
            present.append(arg is not None)
        elif isinstance(arg, tuple):
            present += [True] * _count(arg)
    present_operands = [spec for spec, there in zip(line.operands, present, strict=False) if there]
    return replace(line, operands=tuple(present_operands))


def _count(arg: Sequence[object]) -> int:
    return sum(isinstance(item, Ref) for item in arg)
