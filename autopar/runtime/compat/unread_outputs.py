"""Gradients of compiled code of which some outputs are not read: AOTAutograd takes zeros for what has no gradient, and gives
zeros to the parameters of a head that no loss reads, in place of None, so that weight decay and moments would move them. Seen on
2.13.0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

Compiled = Callable[..., Any]
_ONE_BY_ONE = "autopar.one_by_one"


def marked_one_by_one(order: Sequence[int]) -> AbstractContextManager[None]:
    """Mark a Function of several tensors that torch.compile traces inside: each result is computed of the tensor at its place,
    though one collective has them all. `order`: of the first use of each in the forward, in which its operands stand in the
    graph."""
    return torch.fx.traceback.annotate({_ONE_BY_ONE: tuple(order)})


def with_unread_outputs(graph: fx.GraphModule, compiled: Compiled) -> Compiled:
    """Return the compiled code of a graph, whose inputs have no gradient where no output that is computed of them has one."""
    readers = _outputs_by_input(graph)
    if len({each for each in readers if each}) < 2:
        return compiled  # an output that is not read has no backward at all

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        unread = set[int]()
        results = list(compiled(*_passed(_Inputs, (unread, readers), args)))
        return _passed(_Outputs, (unread,), results)

    return run


def _passed(function: Any, options: tuple[Any, ...], values: Sequence[Any]) -> list[Any]:
    """Return the values, of which those with a gradient went through a Function, which is told their places."""
    out, places = list(values), [place for place, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    if places:
        for place, x in zip(places, function.apply(*options, places, *(out[each] for each in places)), strict=True):
            out[place] = x
    return out


class _Inputs(torch.autograd.Function):
    """The inputs as they are; in the backward those get no gradient of which no output was read."""

    @staticmethod
    def forward(ctx: Any, unread: set[int], readers: Sequence[frozenset[int]], places: list[int], *inputs: torch.Tensor) -> Any:
        ctx.unread, ctx.readers = unread, [readers[place] for place in places]
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *(None if own <= ctx.unread else grad for own, grad in zip(ctx.readers, grads, strict=True))


class _Outputs(torch.autograd.Function):
    """The outputs as they are; the backward, which comes before that of the inputs, notes which of them were not read."""

    @staticmethod
    def forward(ctx: Any, unread: set[int], places: list[int], *outputs: torch.Tensor) -> Any:
        ctx.unread, ctx.places = unread, places
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.unread.clear()  # of a backward before, which kept the graph
        ctx.unread.update(place for place, grad in zip(ctx.places, grads, strict=True) if grad is None)
        return None, None, *grads


def _outputs_by_input(graph: fx.GraphModule) -> list[frozenset[int]]:
    """Return, for each input of a graph of torch.compile, the places of the outputs whose gradients come to it."""
    inputs = graph.graph.find_nodes(op="placeholder")
    sources: dict[fx.Node, frozenset[int]] = {node: frozenset((place,)) for place, node in enumerate(inputs)}
    for node in graph.graph.nodes:
        values = [x for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, torch.Tensor)]
        if node not in sources and (not values or any(x.requires_grad for x in values)):
            sources[node] = frozenset[int]().union(*(sources.get(each, ()) for each in _operands(node)))
    outputs = graph.graph.output_node().args[0]
    read = [sources.get(each, frozenset()) if isinstance(each, fx.Node) else frozenset() for each in outputs]  # type: ignore
    return [frozenset(place for place, each in enumerate(read) if number in each) for number in range(len(inputs))]


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return what a node is computed of; the one at its place, of what `marked_one_by_one` makes."""
    made = node.args[0] if node.target is operator.getitem else None
    order = made.meta.get("custom", {}).get(_ONE_BY_ONE) if isinstance(made, fx.Node) else None
    if order is None:
        return node.all_input_nodes
    tensors = [each for each in made.args if isinstance(each, fx.Node) and each.op != "get_attr"]  # type: ignore[union-attr]
    return [tensors[order.index(node.args[1])]]
