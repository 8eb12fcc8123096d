"""Checks that every string of a plan is what it stands for: a name of a value, a path of a parameter, an operation, a dtype.

A plan is data from anywhere, and some of its strings become the text of a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from autopar.ir.graph import Block, DType, Graph, Node, Ref, Symbol, Value, leaves
from autopar.ir.interface import OUTPUT_KINDS
from autopar.ir.plan import OFFLOAD_DEVICES
from autopar.ir.plan_file.document import PlanDocument
from autopar.ir.regions import inner_nodes
from autopar.ir.size_grammar import parse_size

DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    + ("float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "uint16", "uint32", "uint64")
)
LONGEST = 500
MOST_DIMS = 64

_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)  # of values of nn.Sequential too: "0_bias", which the text spells as p0_bias
_PATH = re.compile(r"(?:[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*)?", re.ASCII)
_OP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:(?:::|\.)[A-Za-z0-9_]+)+", re.ASCII)
_LINE = re.compile(r"[^\x00-\x1f\x7f\u0085\u2028\u2029]*")
_ACTIONS = re.compile(r"[0-9A-Z_ \n]*", re.ASCII)
_SCHEDULE = re.compile(r"[a-z0-9_-]+", re.ASCII)


def check_names(document: PlanDocument) -> None:
    """ValueError, one line, for the first string that is not what it should be."""
    _all(_NAME, "the name of a mesh axis", (axis.name for axis in document.mesh.axes))
    _all(None, "a dtype", (document.precision.compute, document.precision.master, document.precision.reduce or "float32"))
    if document.precision.offload_optimizer not in ("", *OFFLOAD_DEVICES):
        raise ValueError(
            f"offload_optimizer {document.precision.offload_optimizer[:40]!r} is none of {', '.join(OFFLOAD_DEVICES)}"
        )
    _all(_SCHEDULE, "the name of a schedule", [document.schedule.schedule])
    _all(_ACTIONS, "the text of a schedule", [document.schedule.actions], longest=10_000_000)
    _all(_NAME, "the name of a value", document.schedule.repeated)
    _all(_LINE, "one line", (document.model.name, document.model.source, document.cluster.name, document.optimizer))
    _all(_LINE, "one line", [document.search.cut_short])
    if document.search.fastest is not None:
        _all(_LINE, "one line", [document.search.fastest.plan])
    for block in document.blocks:
        _all(_NAME, "the name of a block or value", (block.block, *block.recompute_nodes, *(name for name, _ in block.offload)))
        parts = block.partition_saved
        _all(_NAME, "the name of a value or mesh axis", (name for value, _, axis in parts for name in (value, axis)))
        conversions = (*block.conversions, *block.recompute_conversions)
        _all(_NAME, "the name of a value", (conversion.value for conversion in conversions))
    for op in document.ops:
        _all(_NAME, "the name of a block or node", (op.block, op.node))
        _all(_OP, "an operation", (op.op, *([op.function] if op.function else ())))
        _all(_LINE, "one line", op.factors)
    _graph(document.graph)


def _graph(graph: Graph) -> None:
    _all(_NAME, "the name of a graph", [graph.name])
    for value in graph.inputs:
        _value(value)
    for block in graph.blocks:
        _block(block)
    for call in graph.calls:
        _all(_NAME, "the name of a block or value", (call.block, *call.inputs, *call.outputs))
        _all(_PATH, "the path of a module or parameter", (call.prefix, *call.parameters))
    _all(_NAME, "the name of a value", (graph.loss, *(output.value for output in graph.outputs)))
    _all(_LINE, "one line", (*graph.notes, *(output.path for output in graph.outputs)))
    for output in graph.outputs:
        if output.kind not in OUTPUT_KINDS:
            raise ValueError(f"{output.kind!r} is no way to return an output: write one of {', '.join(OUTPUT_KINDS)}")
    if graph.interface is not None:
        _all(_NAME, "the name of an argument", graph.interface.positional)
        for argument in graph.interface.arguments:
            _all(_LINE, "one line", (argument.path, argument.input, argument.constant))


def _block(block: Block) -> None:
    _all(_NAME, "the name of a block or value", (block.name, *block.outputs, *(value for _, value in block.updates)))
    _all(_PATH, "the path of a buffer", (path for path, _ in block.updates))
    for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
        _value(value)
    _all(_PATH, "the path of a parameter", (parameter.path for parameter in block.parameters))
    for node in block.nodes:
        _node(node)


def _node(node: Node) -> None:
    _all(_OP, "an operation", [node.op])
    _all(_OP, "an operation", [inner.op for inner in inner_nodes(node)])
    _all(_NAME, "the name of an argument", (key for key, _ in node.kwargs))
    _all(_LINE, "one line", (node.module, node.source))
    for value in node.outputs:
        _value(value)
    for arg in leaves((*node.args, *(arg for _, arg in node.kwargs))):
        if isinstance(arg, Ref):
            _all(_NAME, "the name of a value", [arg.name])
        elif isinstance(arg, DType):
            _all(None, "a dtype", [arg.name])
        elif isinstance(arg, str):
            _all(_LINE, "one line", [arg])
        elif isinstance(arg, Symbol) and isinstance(arg.dim, str):
            parse_size(arg.dim)


def _value(value: Value) -> None:
    _all(_NAME, "the name of a value", [value.name])
    _all(None, "a dtype", [value.dtype])
    for dim in value.shape:
        if isinstance(dim, str):
            parse_size(dim)
    if len(value.shape) > MOST_DIMS or any(isinstance(dim, int) and not 0 <= dim < 2**48 for dim in value.shape):
        raise ValueError(f"{value.name} has a shape that no tensor has: {str(value.shape)[:60]}")


def _all(form: re.Pattern[str] | None, what: str, texts: Iterable[Any], longest: int = LONGEST) -> None:
    for text in texts:
        fits = isinstance(text, str) and len(text) <= longest and (form.fullmatch(text) if form is not None else text in DTYPES)
        if not fits:
            raise ValueError(f"{str(text)[:60]!r} is not {what}")
