"""Writes into tensors that autograd does not see (under ``no_grad``, into ``x.data`` and ``x.detach()``): the tensor has the new
value from there on, and the gradient of its readers goes to what made it, as if nothing were written.

A written tensor x is x_new.detach() + (x - x.detach()) afterwards, as operations of the exported program: the second term is
zero, and has the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_batchedtensor
from torch.export import ExportedProgram

from autopar.capture.tracing.guards import NO_GRAD_MARK
from autopar.capture.tracing.places import source_line
from autopar.errors import CaptureError

aten = torch.ops.aten
_REMEDY = "write it as h = h + (new - h).detach()"


def keep_gradients(program: ExportedProgram) -> None:
    """Add the gradient that a write without autograd leaves. CaptureError where a gradient would also go into what is written."""
    _Gradients(program.graph_module).run()


class _Gradients:
    """The memory of a program that gradients flow from (`flows`, more rather than less), its first tensors (`roots`), and
    the nodes that gradients do not flow from all the same (`cut`). `terms` are zeros with the gradient of a root."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.flows, self.cut = set[int](), set[fx.Node]()
        self.roots: dict[int, fx.Node] = {}
        self.terms: dict[int, fx.Node] = {}

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        if not any(_writes(node) or self.body(node) for node in nodes):
            return
        for node in nodes:
            if node.op == "placeholder":
                self.note(node, isinstance(_val(node), torch.Tensor) and _val(node).requires_grad)
            elif node.op == "call_function":
                body = self.body(node)
                if body is not None:
                    self.region(node, body)
                else:
                    self.operation(node)
        self.graph.lint()

    def body(self, node: fx.Node) -> fx.GraphModule | None:
        """Return the body of a region under ``no_grad``."""
        if str(node.target) != "wrap_with_set_grad_enabled" or node.args[0] is not False:
            return None
        found: fx.GraphModule = getattr(self.module, str(node.args[1].target))  # type: ignore[union-attr]
        return found

    def note(self, node: fx.Node, flows: bool) -> None:
        """Note the memory of a node's tensor, and whether gradients flow from it."""
        for storage in _storages(node):
            if storage not in self.roots and isinstance(_val(node), torch.Tensor):
                self.roots[storage] = node
            if flows:
                self.flows.add(storage)

    def has_gradient(self, node: fx.Node) -> bool:
        return node not in self.cut and not self.flows.isdisjoint(_storages(node))

    def operation(self, node: fx.Node) -> None:
        """Note what an operation outside of ``no_grad`` gives, and what it writes."""
        operands = node.all_input_nodes
        written = list(_writes(node))
        for tensor in written:
            (storage,) = _storages(tensor)
            given = any(self.has_gradient(each) for each in operands if each is not tensor)
            if tensor not in self.cut:
                self.terms.pop(storage, None)
                if given:
                    self.flows.add(storage)
            elif storage in self.flows:
                if given and (node.users or len(tensor.users) > 1):
                    raise CaptureError(f"{source_line(node)}: writes what has a gradient into a detached tensor; {_REMEDY}")
                self.keep(storage, node, node)
        own = {storage for each in operands for storage in _storages(each)}
        if node.target in (aten.detach.default, aten.detach_.default):
            self.cut.add(node)
        elif any(each in self.cut for each in operands) and not own.isdisjoint(_storages(node)):
            sources = [each for each in operands if not set(_storages(each)).isdisjoint(_storages(node))]
            if all(each in self.cut for each in sources):
                self.cut.add(node)
        fresh = not written and own.isdisjoint(_storages(node))
        self.note(node, fresh and any(map(self.has_gradient, operands)))

    def region(self, node: fx.Node, body: fx.GraphModule) -> None:
        """Note what a region under ``no_grad`` gives, and what it writes."""
        operands: Sequence[Any] = node.args[2:]
        inside = [each for each in body.graph.nodes if each.op == "placeholder"]
        outer = {
            own: storage
            for each, operand in zip(inside, operands, strict=True)
            if isinstance(operand, fx.Node)
            for own, storage in zip(_storages(each), _storages(operand), strict=True)
        }
        for own in body.graph.nodes:
            if "set_grad_enabled" in str(own.target):
                for writer, storage in _written(getattr(body, str(own.args[1].target)).graph):
                    if outer.get(storage) in self.flows:
                        raise CaptureError(f"{source_line(writer)}: a write under enable_grad() in no_grad(); {_REMEDY}")
        written = {outer[storage]: writer for writer, storage in _written(body.graph) if storage in outer}
        for storage, writer in written.items():
            if storage in self.flows:
                self.keep(storage, node, writer)
        output = next(each for each in body.graph.nodes if each.op == "output").args[0]
        results = output if isinstance(output, (tuple, list)) else (output,)
        given = dict(zip(inside, operands, strict=True))
        for user in list(node.users):
            if not isinstance(user.args[1], int):
                continue
            result = results[user.args[1]]
            while isinstance(result, fx.Node) and (before := list(_writes(result))) and _val(result) is not None:
                result = before[0]
            if isinstance(operand := given.get(result), fx.Node):
                user.replace_all_uses_with(operand)  # a tensor that was written in the region is the one outside
            else:
                self.cut.add(user)

    def keep(self, storage: int, node: fx.Node, writer: fx.Node) -> None:
        """Let the tensor that `node` writes have the gradient that it had before."""
        root = self.roots[storage]
        if root.op == "placeholder" or not isinstance(_val(root), torch.Tensor):
            return
        before = self.terms.get(storage)
        if before is None:
            with self.graph.inserting_before(node):
                detached = self.add(aten.detach.default, (root,), root, writer)
                before = self.add(aten.sub.Tensor, (root, detached), root, writer)
                if not _val(root).is_complex():
                    before = self.add(aten.nan_to_num.default, (before,), root, writer)  # where x is infinite
            self.terms[storage] = before
        with self.graph.inserting_after(node):
            new = self.add(aten.detach.default, (root,), root, writer)
        with self.graph.inserting_after(new):
            value = self.add(aten.add.Tensor, (new, before), root, writer)
        with self.graph.inserting_after(value):
            self.add(aten.copy_.default, (root, value), root, writer)

    def add(self, target: Any, args: tuple[fx.Node, ...], root: fx.Node, writer: fx.Node) -> fx.Node:
        """Add an operation at the place in the source of what writes."""
        made = self.graph.call_function(target, args)
        with _val(root).fake_mode:
            val = target(*map(_val, args))
        custom = {key: each for key, each in (root.meta.get("custom") or {}).items() if key != NO_GRAD_MARK}
        made.meta = {**root.meta, "custom": custom, "stack_trace": writer.meta.get("stack_trace"), "val": val}
        return made


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _writes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that an operation writes."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        given = [*node.args, *(node.kwargs.get(each.name) for each in node.target._schema.arguments[len(node.args) :])]
        for value, argument in zip(given, node.target._schema.arguments, strict=False):
            info = argument.alias_info
            if info is not None and info.is_write and isinstance(value, fx.Node) and _storages(value):
                yield value


def _written(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield each operation of a graph that writes, with the memory that it writes."""
    for node in graph.nodes:
        for tensor in _writes(node):
            yield from ((node, storage) for storage in _storages(tensor))


def _storages(node: fx.Node) -> list[int]:
    """Return the storages of a node's floating-point tensors; none inside of ``vmap``, where they have none."""
    val = _val(node)
    tensors = [each for each in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(each, torch.Tensor)]
    floats = [each for each in tensors if each.is_floating_point() or each.is_complex()]
    return [each.untyped_storage()._cdata for each in floats if not is_batchedtensor(each)]
