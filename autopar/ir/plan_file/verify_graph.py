"""Checks that a graph is one: every value made once, before it is used; and arguments and shapes that a program may have. The
graph of a plan file is not taken on trust, and what reads graphs relies on it. Start with `verify_graph`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import sympy

from autopar.errors import PlanError
from autopar.ir.dims import parse_size
from autopar.ir.graph import Block, Call, DType, Graph, Node, Ref, Symbol, Value, leaves
from autopar.ir.names import DTYPES, LINE, LONGEST, NAME, OP
from autopar.ir.regions import inner_nodes

MOST_DIMS = 64


def verify_graph(graph: Graph) -> None:
    """PlanError, one line, for the first thing that does not fit."""
    blocks = {block.name: block for block in graph.blocks}
    _once("block", graph.name, (block.name for block in graph.blocks))
    _once("input", graph.name, (value.name for value in graph.inputs))
    for block in graph.blocks:
        _verify_block(block)
    made = {value.name for value in graph.inputs}
    for call in graph.calls:
        if call.block not in blocks:
            raise PlanError(f"a call is of {call.block}, which is no block of the graph; plan the model again")
        _verify_call(call, blocks[call.block], made)
        made.update(call.outputs)
    if missing := [name for name in graph.results if name not in made]:
        raise PlanError(f"the graph returns {missing[0]}, which no call makes; plan the model again")


def _verify_block(block: Block) -> None:
    where = f"block {block.name}"
    known = {value.name for value in block.inputs} | {parameter.value.name for parameter in block.parameters}
    given = [*(value.name for value in block.inputs), *(parameter.value.name for parameter in block.parameters)]
    _once("value", where, [*given, *(value.name for node in block.nodes for value in node.outputs)])
    for node in block.nodes:
        if not node.outputs:
            raise PlanError(f"{where}: {node.op} has no result; plan the model again")
        if missing := [name for name in node.operands() if name not in known]:
            raise PlanError(f"{where}: {node.name} reads {missing[0]}, which nothing before it makes; plan the model again")
        known.update(value.name for value in node.outputs)
    read = (*block.outputs, *(name for update in block.updates for name in update))
    if missing := [name for name in read if name not in known]:
        raise PlanError(f"{where} hands on {missing[0]}, which it does not have; plan the model again")


def _verify_call(call: Call, block: Block, made: set[str]) -> None:
    where = f"the call of {call.block} at {call.prefix or 'the model'}"
    pairs = ((call.inputs, block.inputs), (call.outputs, block.outputs), (call.parameters, block.parameters))
    if any(len(names) != len(values) for names, values in pairs):
        raise PlanError(f"{where} has other numbers of inputs, outputs or parameters than its block; plan the model again")
    if missing := [name for name in call.inputs if name not in made]:
        raise PlanError(f"{where} reads {missing[0]}, which no call before it makes; plan the model again")
    if twice := [name for name in call.outputs if name in made]:
        raise PlanError(f"{where} makes {twice[0]}, which is there already; plan the model again")
    _once("value", where, call.outputs)


def _once(what: str, where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{where}: the {what} {name} is there twice; plan the model again")
        seen.add(name)


def verify_texts(graph: Graph) -> None:
    """ValueError, one line, for the first shape or argument of an operation that is none. Their types allow more than a program
    may have: all other texts are checked by the types of their fields."""
    for value in (*graph.inputs, *(value for block in graph.blocks for value in block.values().values())):
        _verify_shape(value)
    for condition in graph.interface.batch_conditions if graph.interface is not None else ():
        parse_size(condition.size)
    for node in (node for block in graph.blocks for node in block.nodes):
        _fit(NAME, "the name of an argument", (name for name, _ in node.kwargs))
        _fit(OP, "an operation", (inner.op for inner in inner_nodes(node)))
        _verify_arguments(node)


def _verify_arguments(node: Node) -> None:
    for arg in leaves((*node.args, *(arg for _, arg in node.kwargs))):
        if isinstance(arg, Ref):
            _fit(NAME, "the name of a value", [arg.name])
        elif isinstance(arg, DType):
            _fit("|".join(DTYPES), "a dtype", [arg.name])
        elif isinstance(arg, str):
            _fit(LINE, "one line", [arg])
        elif isinstance(arg, Symbol) and isinstance(arg.dim, str):
            _, divisor = sympy.fraction(sympy.together(parse_size(arg.dim)))
            if divisor.free_symbols and not arg.real:
                raise ValueError(f"{arg.dim} is no size")


def _verify_shape(value: Value) -> None:
    for dim in value.shape:
        if isinstance(dim, str):
            parse_size(dim)
    if len(value.shape) > MOST_DIMS or any(isinstance(dim, int) and not 0 <= dim < 2**48 for dim in value.shape):
        raise ValueError(f"{value.name} has a shape that no tensor has: {str(value.shape)[:60]}")


def _fit(form: str, what: str, texts: Iterable[str]) -> None:
    for text in texts:
        if len(text) > LONGEST or not re.fullmatch(form, text):
            raise ValueError(f"{text[:60]!r} is not {what}")
