"""Gradients of compiled code of which some outputs are not read: AOTAutograd takes zeros for what has no gradient, and gives
zeros to the parameters of a head that no loss reads, in place of None, so that weight decay and moments would move them. Seen on
2.13.0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from .autograd import storage_key

Compiled = Callable[..., Any]
_ONE_BY_ONE = "autopar.one_by_one"


def marked_one_by_one(order: Sequence[int]) -> AbstractContextManager[None]:
    """Mark a Function of several tensors that torch.compile traces inside: each result is computed of the tensor at its place,
    though one collective has them all. `order`: of the first use of each in the forward, in which its operands stand in the
    graph."""
    return torch.fx.traceback.annotate({_ONE_BY_ONE: tuple(order)})


def with_unread_outputs(graph: fx.GraphModule, compiled: Compiled) -> Compiled:
    """Return the compiled code of a graph, whose inputs have no gradient where no output that is computed of them has one."""
    try:
        readers = _outputs_by_input(graph)
    except NotImplementedError:  # a tensor without a storage (a sparse one)
        return compiled
    if len(set(filter(None, readers))) < 2:
        return compiled  # an output that is not read has no backward at all

    def run(*args: Any) -> Any:
        unread = set[int]()
        results = list(compiled(*_passed(_Inputs, (unread, readers), args)))
        return _passed(_Outputs, (unread,), results)

    return run


def _passed(function: Any, options: tuple[Any, ...], values: Sequence[Any]) -> list[Any]:
    """Return the values, of which those with a gradient went through a Function, which is told their places."""
    out, places = list(values), [place for place, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]
    if places:
        for place, x in zip(places, function.apply(*options, places, *(out[each] for each in places)), strict=True):
            out[place] = x
    return out


class _Inputs(torch.autograd.Function):
    """The inputs as they are; in the backward those get no gradient of which no output was read."""

    @staticmethod
    def forward(ctx: Any, unread: set[int], readers: Sequence[frozenset[int]], places: list[int], *inputs: Tensor) -> Any:
        ctx.unread, ctx.readers = unread, [readers[place] for place in places]
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *(None if own and own <= ctx.unread else x for own, x in zip(ctx.readers, grads, strict=True))


class _Outputs(torch.autograd.Function):
    """The outputs as they are; the backward, which comes before that of the inputs, notes which of them were not read."""

    @staticmethod
    def forward(ctx: Any, unread: set[int], places: list[int], *outputs: Tensor) -> Any:
        ctx.unread, ctx.places = unread, places
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.unread.clear()  # of a backward before, which kept the graph
        ctx.unread.update(place for place, grad in zip(ctx.places, grads, strict=True) if grad is None)
        return None, None, *grads


def is_of_compiled_code(x: Tensor) -> bool:
    """Return whether compiled code made a tensor: the backward of that runs once."""
    return x.grad_fn is not None and x.grad_fn.name() in ("CompiledFunctionBackward", f"{_Outputs.__name__}Backward")


def _outputs_by_input(graph: fx.GraphModule) -> list[frozenset[int]]:
    """Return, for each input of a graph of torch.compile, the places of the outputs whose gradients come to it; of an input that
    is written into, none."""
    inputs = graph.graph.find_nodes(op="placeholder")
    flow = _Flow()
    for place, node in enumerate(inputs):
        for x in _tensors(node):
            flow.sources.setdefault(storage_key(x), set()).add(place)
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            flow.add(node)
    outputs = graph.graph.output_node().args[0]
    read = [flow.read([each]) if isinstance(each, fx.Node) else set() for each in outputs]  # type: ignore[union-attr]
    if any(storage_key(x) in flow.written and x.requires_grad for node in inputs for x in _tensors(node)):
        return []  # autograd refuses such a write into what went through a Function
    return [frozenset(place for place, each in enumerate(read) if number in each) for number in range(len(inputs))]


class _Flow:
    """The inputs of a graph by the storages whose values are computed of them: a write into a view is one into its base. `parts`:
    those of tensors that are parts of one storage and each computed of its own, where nothing is written."""

    def __init__(self) -> None:
        self.sources: dict[Any, set[int]] = {}
        self.parts: dict[int, set[int]] = {}
        self.written = set[Any]()

    def read(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the inputs that gradients of these values come to."""
        return set[int]().union(*(self._of(x) for node in nodes for x in _tensors(node)))

    def _of(self, x: Tensor) -> set[int]:
        key = storage_key(x)
        if key in self.written:
            return self.sources[key]
        return self.parts.get(id(x), self.sources.get(key, set())) if x.requires_grad else set()

    def add(self, node: fx.Node) -> None:
        """Follow the next operation of the graph."""
        results, operands = _tensors(node), node.all_input_nodes
        made: Any = operands[0].meta.get("example_value") if node.target is operator.getitem else None
        if isinstance(made, (tuple, list)):
            if results and id(part := made[node.args[1]]) in self.parts:  # type: ignore[index]
                self.parts[id(results[0])] = self.parts[id(part)]
            return  # one of several results, whose storages are known
        order = node.meta.get("custom", {}).get(_ONE_BY_ONE)
        tensors = [each for each in operands if each.op != "get_attr" and isinstance(each.meta.get("example_value"), Tensor)]
        if order is not None and len(order) == len(results) == len(tensors):
            for place, x in enumerate(results):
                self.parts[id(x)] = self.read([tensors[order.index(place)]])
                self._change(x, self.parts[id(x)])
            return
        sources, writes = self.read(operands), node.meta.get("example_value") is None or _is_write(node)
        for x in (*results, *(x for each in operands for x in _tensors(each) if writes)):
            self._change(x, sources)
            if writes:
                self.written.add(storage_key(x))
        if len(results) == len(tensors) == 1 and storage_key(results[0]) == storage_key(_tensors(tensors[0])[0]):
            self.parts[id(results[0])] = sources  # a view

    def _change(self, x: Tensor, sources: set[int]) -> None:
        self.sources.setdefault(storage_key(x), set()).update(sources)


def _is_write(node: fx.Node) -> bool:
    """Return whether an operation may write into an operand; one whose results are other storages, and that has no name of a
    write, does not."""
    if "out" in node.kwargs or node.kwargs.get("inplace") or node.op == "call_module":
        return True
    schema = getattr(node.target, "_schema", None)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = getattr(operator, f"__{name}__", None) is node.target and name.startswith("i")  # operator.iadd
    return in_place or (schema is not None and schema.is_mutable) or (name.endswith("_") and not name.endswith("__"))


def _tensors(node: fx.Node) -> list[Tensor]:
    return [x for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
