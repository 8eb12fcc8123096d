"""Writes into tensors and slices of them, as operations that give what the whole tensor is afterwards (functionalization)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._export.utils import _is_cia_op, _is_preservable_cia_op

aten = torch.ops.aten
_SCATTERS: dict[Any, Any] = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""Views whose writes are followed, each with the operation that puts what is written into the tensor it is a view of."""

Call = Callable[..., fx.Node]
"""Adds an operation to the new graph: ``call(operation, operands, val=...)``."""


class NotLocal(Exception):
    """The graph is traced as a whole: it changes tensors in place of which it has other views than slices, reads numbers of
    them, has control flow or autocast, or one of its operations could not be taken apart alone."""


class Writes:
    """The tensors of a graph by the memory that they are in, and which slices are older than what was written last.

    `results` has what becomes of each node, `buffers` are the placeholders that may be written, `table` has operations that
    will be taken apart."""

    def __init__(self, results: dict[fx.Node, Any], buffers: Iterable[fx.Node], table: Mapping[Any, Any]) -> None:
        self.results, self.buffers, self.table = results, frozenset(buffers), table
        self.members: dict[int, list[fx.Node]] = {}
        self.old = set[fx.Node]()

    def add(self, node: fx.Node) -> None:
        """Note the memory of a node's tensors, or where they may be: what torch does not say of operations that it takes apart
        (dropout that drops nothing is its operand)."""
        storages = {*_storages(node)}
        if node.op == "call_function" and not self.tells_memory(node.target):
            storages.update(storage for each in node.all_input_nodes for storage in _storages(each))
        for storage in storages:
            self.members.setdefault(storage, []).append(node)

    def refresh(self, node: fx.Node, call: Call) -> None:
        """Slice again what is older than the tensor that it is a slice of."""
        if node in self.old:
            *views, root = _chain(node)
            self.results[node] = self.slices(views, self.results[root], call)[-1]
            self.old.discard(node)

    def slices(self, views: Sequence[fx.Node], root: fx.Node, call: Call) -> list[fx.Node]:
        """Return the tensor, its slice, the slice of that, ...: all of `views`, of which the first is the innermost."""
        found = [root]
        for view in reversed(views):
            found.append(call(view.target, [found[-1], *replaced(view.args[1:], self.results)], val=view.meta["val"]))
        return found

    def write(self, tensor: fx.Node, value: fx.Node, call: Call) -> None:
        """Let a tensor, or a slice of one, be `value` from here on, for all that share its memory. NotLocal where others than
        its slices may."""
        *views, root = _chain(tensor)
        shared = [node for storage in _storages(root) for node in self.members[storage]]
        if not self.is_owner(root) or any(_chain(node)[-1] is not root for node in shared):
            raise NotLocal(f"views of a tensor that is changed in place: {root.target}")
        for view, whole in zip(views, reversed(self.slices(views[1:], self.results[root], call)), strict=False):
            operands = [whole, value, *replaced(view.args[1:], self.results)]
            value = call(_SCATTERS[view.target], operands, val=view.all_input_nodes[0].meta["val"])
        for node in shared:
            if len(_chain(node)) > 1:
                self.old.add(node)
            else:
                self.results[node] = value
        self.refresh(tensor, call)

    def is_owner(self, root: fx.Node) -> bool:
        """Return whether a tensor's memory is its own: an operation made it, or it is a buffer."""
        return root in self.buffers or (self.tells_memory(root.target) and not root.target.is_view)  # type: ignore[union-attr]

    def tells_memory(self, target: Any) -> bool:
        """Return whether torch says whose memory an operation's result is in."""
        if target is aten.batch_norm.default:  # made of others, and never its operand
            return True
        return isinstance(target, torch._ops.OpOverload) and stays_whole(target) and target not in self.table


def _chain(node: fx.Node) -> list[fx.Node]:
    """Return a tensor, what it is a slice of, and so on to what is no slice; a tensor that was written is the one before."""
    found = []
    while True:
        while is_in_place(node):
            node = node.all_input_nodes[0]
        found.append(node)
        if node.target not in _SCATTERS:
            return found
        node = node.all_input_nodes[0]


def is_in_place(node: fx.Node) -> bool:
    one = isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), torch.Tensor)
    return one and node.target._schema.is_mutable and functional(node) is not None  # type: ignore[union-attr]


def functional(node: fx.Node) -> Any:
    """Return the operation that gives what an in-place operation of tensors writes; None where torch has none of that name."""
    target: Any = node.target
    name = target.overloadpacket.__name__
    packet = getattr(aten, name[:-1], None) if target.namespace == "aten" and name.endswith("_") else None
    found = getattr(packet, target._overloadname, None)
    return found if found is not None and not found._schema.is_mutable and not found.is_view else None


def stays_whole(target: Any) -> bool:
    """Return whether an operation stays as it is: composite ones do, unless what they give may be what they take."""
    return not (isinstance(target, torch._ops.OpOverload) and _is_cia_op(target) and not _is_preservable_cia_op(target))


def _storages(node: fx.Node) -> list[int]:
    """Return the storages of a node's tensors."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, (tuple, list)) else [val]
    return [each.untyped_storage()._cdata for each in tensors if isinstance(each, torch.Tensor)]


def replaced(args: Any, results: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg(args, lambda node: results[node])
