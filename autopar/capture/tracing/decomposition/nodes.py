"""Composite operations taken apart node by node, and in-place operations (`writes`). Seen on torch 2.13.0: which composite
operations `run_decompositions` keeps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.tracing.decomposition.writes import NotLocal, Writes, functional, is_in_place, replaced, stays_whole

Table = Mapping[Any, Callable[..., Any]]

aten = torch.ops.aten
_CASTS = frozenset({"to", "type_as", "contiguous"})
_RESHAPES = frozenset({"reshape", "flatten", "unflatten", "view_as", "reshape_as"})
_SIZES = frozenset({aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.sym_storage_offset.default})
_COPIES = frozenset({aten.lift_fresh_copy.default, aten.resolve_conj.default, aten.resolve_neg.default})
_OTHER_NAMES = frozenset(
    {"concat", "concatenate", "absolute", "clip", "divide", "greater", "greater_equal", "less", "less_equal", "multiply"}
    | {"negative", "not_equal", "subtract"}
)
"""Composite operations that are one other operation, which is not composite."""
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
_MOST_LEVELS = 8


def decomposed_graph(program: ExportedProgram, table: Table) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Return the graph of an exported program as `run_decompositions` gives it, and its first results: the new values of the
    buffers that are written, by name. What the table has, and composite operations that may return their operand, are taken
    apart, and regions under ``no_grad`` are part of the graph. Sizes are arguments of what reads them. NotLocal where that takes
    more than one node at a time."""
    try:
        return _Decomposition(program.graph_module, table).run(program.graph_signature.inputs_to_buffers)
    except NotLocal:
        raise
    except Exception as error:  # torch's own tracing, of the whole program, is the judge
        raise NotLocal(str(error)) from error


class _Decomposition:
    def __init__(self, module: fx.GraphModule, table: Table) -> None:
        self.module, self.table, self.graph = module, table, fx.Graph()

    def run(self, buffers: Mapping[str, str]) -> tuple[fx.Graph, dict[str, fx.Node]]:
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            _check(node)
        names = {node: buffers[node.name] for node in nodes if node.op == "placeholder" and node.name in buffers}
        results = {node: self.graph.node_copy(node) for node in nodes if node.op == "placeholder"}
        before = dict(results)
        self.copy(self.module, results, {}, 0, names)
        written = {name: results[node] for node, name in names.items() if results[node] is not before[node]}
        outputs = replaced(output_node(self.module.graph).args[0], results)
        self.graph.output((*written.values(), *outputs))
        self.graph.eliminate_dead_code()
        return self.graph, written

    def copy(
        self, module: fx.GraphModule, results: dict[fx.Node, Any], meta: Mapping[str, Any], level: int,
        buffers: Iterable[fx.Node] = (),
    ) -> None:  # fmt: skip
        """Add the nodes of a graph, taken apart; `results` has the placeholders, and then what becomes of each node."""
        if level > _MOST_LEVELS:
            raise NotLocal("operations that are made of themselves")
        writes = Writes(results, buffers, self.table)
        for node in module.graph.nodes:
            now = {**node.meta, **meta}
            for read in node.all_input_nodes:  # a slice may be one that gradients flow through, in a region under no_grad too
                own = {**now, "custom": {**read.meta, **meta}.get("custom")}
                writes.refresh(read, partial(self.call, kwargs={}, meta=own))
            if node.op == "get_attr":
                results[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                results[node] = self.node(node, writes, now, level)
            writes.add(node)

    def node(self, node: fx.Node, writes: Writes, meta: dict[str, Any], level: int) -> Any:
        """Return what becomes of a node: a node of the new graph, a number, or several of them."""
        _check(node)
        results = writes.results
        if _is_no_grad_region(node):
            _, body, *operands = replaced(node.args, results)
            return self.inner(body, operands, meta, level)
        if _is_number(node):
            return node.meta["val"]
        args, kwargs = replaced(node.args, results), replaced(dict(node.kwargs), results)
        if _is_constant(node):
            return args[0]
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]  # of a region's results
        if node.target is aten._assert_tensor_metadata.default:
            return None
        if node.target in self.table:
            return self.expanded(node, self.table[node.target], args, kwargs, meta, level)
        if is_in_place(node):
            tensor = node.all_input_nodes[0]
            writes.write(tensor, self.written(node, args, kwargs, meta), partial(self.call, kwargs={}, meta=meta))
            return results[tensor]
        if node.target is aten.batch_norm.default and args[3] is not None and args[5]:
            function = aten._native_batch_norm_legit_functional.default
            result, _, _, *statistics = self.expanded(node, self.table[function], args[:-1], kwargs, meta, level)
            running: Any = node.args[3:5]
            for buffer, value in zip(running, statistics, strict=True):
                writes.write(buffer, value, partial(self.call, kwargs={}, meta=meta))
            return result
        if node.target in _COPIES:
            return self.call(aten.clone.default, args, {}, meta)
        name, x = getattr(getattr(node.target, "overloadpacket", None), "__name__", ""), args[0] if args else None
        if stays_whole(node.target) and name not in _OTHER_NAMES:
            return self.call(node.target, args, kwargs, meta)
        if name in _CASTS and isinstance(x, fx.Node):
            return self.cast(node, x, meta)
        if name in _RESHAPES and isinstance(x, fx.Node):
            return self.reshaped(node, x, args, meta)
        return self.expanded(node, node.target.decompose, args, kwargs, meta, level)  # type: ignore[union-attr]

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], meta: dict[str, Any], val: Any = None) -> fx.Node:
        """Add an operation, of the value that `meta` has or `val`."""
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else target.__name__
        made = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name)
        made.meta = meta if val is None else {**meta, "val": val}
        return made

    def inner(self, module: fx.GraphModule, operands: Sequence[Any], meta: Mapping[str, Any], level: int) -> Any:
        """Add the nodes of a graph in the place of one node, whose place in the source they take."""
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        results: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
        self.copy(module, results, {key: value for key, value in meta.items() if key != "val"}, level + 1)
        return replaced(output_node(module.graph).args[0], results)

    def expanded(
        self, node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any, meta: dict[str, Any], level: int
    ) -> Any:
        """Add the operations that a function calls in the place of a node; the node itself where it returns NotImplemented."""
        leaves, form = tree_flatten((tuple(args), dict(kwargs)))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        values = [each.meta["val"] for each in nodes]
        if not values or not all(isinstance(value, FakeTensor) for value in values):
            raise NotLocal(f"{node.target} of no tensor")
        declined = False

        def run(*tensors: Any) -> Any:
            nonlocal declined
            given = iter(tensors)
            own_args, own_kwargs = tree_unflatten([next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], form)
            result = function(*own_args, **own_kwargs)
            declined = result is NotImplemented
            return () if declined else result

        with values[0].fake_mode, enable_python_dispatcher():
            # functions of the table call composite operations, which are kept; torch's own ones are made of views
            traced = make_fx(run, pre_dispatch=node.target in self.table)(*values)
        if declined:
            return self.call(node.target, args, kwargs, meta)
        if any(each.op == "get_attr" for each in traced.graph.nodes):
            raise NotLocal(f"{node.target} with constants")
        return self.inner(traced, nodes, meta, level)

    def written(self, node: fx.Node, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        """Add the operation that gives what an in-place one writes."""
        function, before = functional(node), node.meta["val"]
        operands, options = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with before.fake_mode:
            after = function(*operands, **options)
        if after.dtype != before.dtype or not stays_whole(function) or function in self.table:
            raise NotLocal(f"{node.target} of another dtype, or composite")
        return self.call(function, args, kwargs, meta)

    def cast(self, node: fx.Node, x: fx.Node, meta: dict[str, Any]) -> fx.Node:
        """Add what ``x.to(...)`` or ``x.contiguous()`` does: nothing, a cast, or a copy."""
        before, after = x.meta["val"], node.meta["val"]
        if (after.dtype, after.device) != (before.dtype, before.device):
            return self.call(aten._to_copy.default, (x,), {"dtype": after.dtype}, meta)
        with before.fake_mode:
            args, kwargs = fx.node.map_arg((node.args[1:], dict(node.kwargs)), lambda each: each.meta["val"])
            again = node.target(before, *args, **kwargs)  # type: ignore[operator]
        if _is_view(again, before):
            return x
        return self.call(aten.clone.default, (x,), {"memory_format": torch.contiguous_format}, meta, again)

    def reshaped(self, node: fx.Node, x: fx.Node, args: Any, meta: dict[str, Any]) -> fx.Node:
        """Add the view that a reshape is, or the copy and its view."""
        before, shape = x.meta["val"], list(node.meta["val"].shape)
        if len(shape) == before.dim() and node.target is aten.flatten.using_ints:
            return x  # of a single dimension
        given = node.target is aten.reshape.default and before.is_contiguous()
        sizes = args[1] if given else shape
        with before.fake_mode:
            after = aten.reshape.default(before, shape)
            copied = before if _is_view(after, before) else before.clone(memory_format=torch.contiguous_format)
        if copied is before:
            return self.call(aten.view.default, (x, sizes), {}, meta, after)
        copy = self.call(aten.clone.default, (x,), {"memory_format": torch.contiguous_format}, meta, copied)
        return self.call(aten._unsafe_view.default, (copy, sizes), {}, meta, after)


def _check(node: fx.Node) -> None:
    """NotLocal for a node that means more than its result, or whose result is a number of a tensor."""
    target = node.target
    if node.op == "get_attr":
        local = all(map(_is_no_grad_region, node.users))
    elif isinstance(target, torch._ops.OpOverload):
        number = isinstance(node.meta.get("val"), _NUMBERS)
        changes = target._schema.is_mutable and not (is_in_place(node) or _is_constant(node))
        local = not changes and (not number or target in _SIZES)
    else:
        local = node.op != "call_function" or _is_no_grad_region(node) or target is operator.getitem or _is_number(node)
    if not local:
        raise NotLocal(str(target))


def _is_no_grad_region(node: fx.Node) -> bool:
    return str(node.target) == "wrap_with_set_grad_enabled"


def _is_constant(node: fx.Node) -> bool:
    """Return whether this is the in-place operation of ``torch.tensor(...)``, whose tensor nobody else has."""
    x = node.args[0] if node.target is aten.detach_.default else None
    return isinstance(x, fx.Node) and x.target is aten.lift_fresh_copy.default


def _is_number(node: fx.Node) -> bool:
    return node.target is not operator.getitem and isinstance(node.meta.get("val"), _NUMBERS)


def _is_view(after: torch.Tensor, before: torch.Tensor) -> bool:
    return after is before or after.untyped_storage()._cdata == before.untyped_storage()._cdata


def output_node(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return found
