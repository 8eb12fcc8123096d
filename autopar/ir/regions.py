"""Regions: the branches of ``ap.cond`` and the condition and body of ``ap.while_loop``, as arguments of their node.

    ap.cond(predicate, (operands), region, region)            ap.while_loop((carried), (further), region, region)

A region is ``(names of its arguments, statements, names of its results)``; a statement is ``(names of its results, operation,
args, kwargs, (shape, dtype) of each result)``. Inside of a region a value is the text ``%name``, since it is no operand of the
node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.dims import Dim
from autopar.ir.graph import Arg, Node, Ref, Symbol, Value, size_argument

REGION_OPS = ("ap.cond", "ap.while_loop")
"""Operations whose last two arguments are regions."""


@dataclass(frozen=True, slots=True)
class Region:
    """The body of a branch. `nodes` read `arguments` and each other; `results` are names of these."""

    arguments: tuple[str, ...]
    nodes: tuple[Node, ...]
    results: tuple[str, ...]


def region_arg(region: Region) -> Arg:
    """A region as an argument of a node."""
    statements = tuple(
        (
            tuple(value.name for value in node.outputs),
            node.op,
            tuple(map(_named, node.args)),
            tuple((key, _named(arg)) for key, arg in node.kwargs),
            tuple((tuple(size_argument(dim) for dim in value.shape), value.dtype) for value in node.outputs),
        )
        for node in region.nodes
    )
    return region.arguments, statements, region.results


def read_region(arg: Arg) -> Region:
    """The inverse of `region_arg`. ValueError for anything else."""
    names, statements, results = _several(arg, 3)
    nodes = []
    for statement in _several(statements):
        made, op, args, kwargs, outs = _several(statement, 5)
        if not isinstance(op, str):
            raise ValueError(f"{op!r} is no operation of a region")
        given = _several(args)
        last = len(given) - 2 if op in REGION_OPS else len(given)
        read = tuple(_value(item) if index < last else item for index, item in enumerate(given))
        pairs = tuple((str(_several(pair, 2)[0]), _value(_several(pair, 2)[1])) for pair in _several(kwargs))
        outputs = []
        for name, out in zip(_texts(made), _several(outs), strict=True):
            shape, dtype = _several(out, 2)
            outputs.append(Value(name, tuple(_dim(size) for size in _several(shape)), str(dtype)))
        nodes.append(Node(op, read, pairs, tuple(outputs)))
    return Region(_texts(names), tuple(nodes), _texts(results))


def regions_of(node: Node) -> tuple[Region, ...]:
    """The regions of a node. ValueError where they are malformed."""
    if node.op not in REGION_OPS:
        return ()
    if len(node.args) != 4:
        raise ValueError(f"{node.op} takes four arguments, not {len(node.args)}")
    return tuple(map(read_region, node.args[2:]))


def inner_nodes(node: Node) -> Iterator[Node]:
    """The nodes inside of a node's regions, at every depth."""
    for region in regions_of(node):
        for inner in region.nodes:
            yield inner
            yield from inner_nodes(inner)


def without_shapes(arg: Arg) -> Arg:
    """A region without shapes and dtypes of its values, as programs write it."""
    names, statements, results = _several(arg, 3)
    short = []
    for statement in _several(statements):
        made, op, args, kwargs, _ = _several(statement, 5)
        if op in REGION_OPS:
            given = _several(args, 4)
            args = (*given[:2], *map(without_shapes, given[2:]))
        short.append((made, op, args, kwargs))
    return names, tuple(short), results


def _named(arg: Arg) -> Arg:
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    return tuple(map(_named, arg)) if isinstance(arg, tuple) else arg


def _value(arg: Arg) -> Arg:
    if isinstance(arg, str) and arg.startswith("%"):
        return Ref(arg[1:])
    return tuple(map(_value, arg)) if isinstance(arg, tuple) else arg


def _dim(arg: Arg) -> Dim:
    if isinstance(arg, Symbol):
        return arg.dim
    if isinstance(arg, int):
        return arg
    raise ValueError(f"{arg!r} is no size")


def _several(arg: Arg, count: int | None = None) -> Sequence[Arg]:
    if not isinstance(arg, tuple) or count not in (None, len(arg)):
        raise ValueError(f"{str(arg)[:40]!r} is no part of a region")
    return arg


def _texts(arg: Arg) -> tuple[str, ...]:
    found = _several(arg)
    if not all(isinstance(item, str) and item.isidentifier() for item in found):
        raise ValueError(f"{str(arg)[:40]!r} are no names")
    return tuple(map(str, found))
