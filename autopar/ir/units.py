"""The units that the examples of a model are counted in: tokens, images or samples."""

from __future__ import annotations

from autopar.ir.dims import Dim, has_batch
from autopar.ir.graph import Graph, Value

TARGETS = ("label", "target")
"""Inputs whose name has one of these words say nothing of the unit."""


def unit_of(graph: Graph) -> str:
    """``tokens`` where an input is integers of shape [batch, length] and none is an image, ``images`` where a floating-point
    input is [batch, channels, height, width] and none is tokens, else ``samples``."""
    inputs = [value for value in graph.inputs if not any(word in value.name.lower() for word in TARGETS)]
    tokens = any(_is_tokens(graph, value) for value in inputs)
    images = any(len(value.shape) == 4 and value.dtype.startswith(("float", "bfloat")) for value in inputs)
    return "samples" if tokens == images else "tokens" if tokens else "images"


def tokens_of(graph: Graph) -> int | None:
    """Tokens of one example; None where the unit is another."""
    if unit_of(graph) != "tokens":
        return None
    return next(int(size) for value in graph.inputs if _is_tokens(graph, value) for size in value.shape[1:])


def _is_tokens(graph: Graph, value: Value) -> bool:
    if not value.dtype.startswith("int") or len(value.shape) != 2 or not isinstance(value.shape[1], int):
        return False
    return value.shape[1] > 1 and _is_batch(graph, value.shape[0])


def _is_batch(graph: Graph, size: Dim) -> bool:
    return has_batch(size) if graph.batch_is_symbolic else size == graph.batch
