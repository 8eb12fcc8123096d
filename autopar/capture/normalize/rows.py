"""Row-wise operations: those that treat each row of a tensor alike, and their form on tensors whose rows are unflattened.

The rows of ``x [B*S, H]`` are its dimension 0; unflattened they are the dimensions ``B, S`` (the *lead*) of ``[B, S, H]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar.capture.constants import resolve
from autopar.capture.flat import size_args
from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Node, Ref, Value
from autopar.operations.pointwise import ROTARY_EMBEDDING

WHOLE = ("aten.sum", "aten.mean", "aten.max", "aten.min", "aten.histc", "ap.count_valid", "ap.cross_entropy_sum")
"""Reductions over all elements, whatever their dimensions."""
OVER = ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax", "aten.amin", "aten.logsumexp", "aten.any.dims", "aten.all.dims")
"""Reductions over some dimensions."""
LIKE = (
    "aten.to", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.clone", "aten.detach", "aten.expand", ROTARY_EMBEDDING
)  # fmt: skip
"""One result for each element."""
ROWS_AT: Mapping[str, tuple[int, ...]] = {
    "aten.linear": (0,),
    "ap.linear_kn": (0,),
    "aten.one_hot": (0,),
    "aten.embedding": (1,),
    "ap.moe_experts": (0, 1, 2),
    "ap.token_log_probs": (0, 1),
}
"""The operands that hold the rows, of operations for which all other dimensions belong to a row."""
ALONG: Mapping[str, tuple[int, Arg]] = {
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.cumsum"), (1, None)),
    **dict.fromkeys(("aten.gather", "aten.scatter", "aten.scatter_add", "aten.unsqueeze", "aten.select"), (1, None)),
    **dict.fromkeys(("aten.argmax", "aten.argmin", "aten.max", "aten.min"), (1, None)),
    **dict.fromkeys(("aten.sort", "aten.argsort"), (1, -1)),
    **dict.fromkeys(("aten.slice", "aten.cat"), (1, 0)),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk"), (2, 0)),
    "aten.topk": (2, -1),
}
"""Operations along one dimension: the position of that argument, and its default."""


@dataclass(frozen=True, slots=True)
class RowwiseNode:
    """The form of a node whose operands `rows` are unflattened; they still have their old names. `lead` is that of its results,
    None where these do not change."""

    node: Node
    rows: frozenset[str]
    lead: Shape | None = None


def rowwise_node(node: Node, values: Mapping[str, Value], apart: Mapping[str, Shape]) -> RowwiseNode | None:
    """The form of a row-wise node; None where it is not row-wise. `apart` has the lead of the values that are unflattened."""
    packet = ".".join(node.op.split(".")[:2])
    given = [name for name in node.operands() if name in apart]
    lead, number = apart[given[0]], values[given[0]].shape[0]
    if any(apart[name] != lead or values[name].shape[0] != number for name in given):
        return None
    if node.op in WHOLE:
        same = all(values[name].shape[:1] == (number,) for name in node.operands())
        return RowwiseNode(node, frozenset(node.operands())) if same else None
    rank = max(len(values[name].shape) for name in node.operands())
    if packet in ROWS_AT:
        rows = frozenset(arg.name for index in ROWS_AT[packet] if isinstance(arg := node.args[index], Ref))
        if set(given) - rows or any(values[name].shape[:1] != (number,) for name in rows):
            return None
        return _of_rows(node, rows, number, lead)
    rows = frozenset(name for name in node.operands() if len(values[name].shape) == rank and values[name].shape[0] == number)
    if set(given) - rows:
        return None
    if node.op in OVER:
        return _over(node, rows, number, lead, rank)
    if packet in ALONG:
        return _along(node, packet, rows, number, lead, rank)
    if packet == "aten.expand":
        if len(node.outputs[0].shape) != rank:
            return None
        return _of_rows(_with(node, 1, size_args((*lead, *node.outputs[0].shape[1:]))), rows, number, lead)
    if packet in LIKE or _is_pointwise(node):
        return _of_rows(node, rows, number, lead) if all(len(value.shape) == rank for value in node.outputs) else None
    return None


def _is_pointwise(node: Node) -> bool:
    return node.op.startswith("aten.") and torch.Tag.pointwise in resolve(node.op).tags


def _of_rows(node: Node, rows: frozenset[str], number: Dim, lead: Shape) -> RowwiseNode | None:
    same = all(value.shape[:1] == (number,) for value in node.outputs)
    return RowwiseNode(node, rows, lead) if same else None


def _with(node: Node, index: int, arg: Arg) -> Node:
    return replace(node, args=(*node.args[:index], arg, *node.args[index + 1 :]))


def _over(node: Node, rows: frozenset[str], number: Dim, lead: Shape, rank: int) -> RowwiseNode | None:
    """A reduction over some dimensions: over the rows, it is over all dimensions of the lead."""
    given = node.args[1] if len(node.args) > 1 else None
    if node.kwargs or given is None or given == ():
        return None
    dims = [int(dim) % rank for dim in (given if isinstance(given, tuple) else (given,))]  # type: ignore[arg-type]
    more = len(lead) - 1
    if 0 not in dims:
        return _of_rows(_with(node, 1, tuple(dim + more for dim in dims)), rows, number, lead)
    if len(node.args) > 2 and node.args[2]:
        return None
    return RowwiseNode(_with(node, 1, (*range(len(lead)), *(dim + more for dim in dims if dim))), rows)


def _along(node: Node, packet: str, rows: frozenset[str], number: Dim, lead: Shape, rank: int) -> RowwiseNode | None:
    at, default = ALONG[packet]
    named = dict(node.kwargs).get("dim")
    dim = node.args[at] if len(node.args) > at else named if named is not None else default
    if not isinstance(dim, int):
        return None
    dim %= rank + (packet == "aten.unsqueeze")
    if dim == 0 and packet == "aten.cat" and len(rows) == len(node.args[0]):  # type: ignore[arg-type]
        return RowwiseNode(replace(node, op="aten.stack", args=(node.args[0], 0), kwargs=()), rows, (len(rows), *lead))
    if dim == 0:
        return None
    moved = dim + len(lead) - 1
    if named is not None:
        kwargs = tuple((key, moved if key == "dim" else arg) for key, arg in node.kwargs)
        return _of_rows(replace(node, kwargs=kwargs), rows, number, lead)
    if len(node.args) > at:
        return _of_rows(_with(node, at, moved), rows, number, lead)
    return _of_rows(node if default == -1 else replace(node, kwargs=(*node.kwargs, ("dim", moved))), rows, number, lead)
