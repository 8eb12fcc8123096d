"""Loops of fixed length, ``torch._higher_order_ops.scan`` and ``map``, as an exported program has them: their steps are written
one after the other, so that every operation inside has its own rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.capture.tracing.places import source_line
from autopar.errors import CaptureError

LOOPS = {"scan": "scan", "map_impl": "map"}
"""Operations of an exported program, and what users call them."""

MOST_NODES = 4096
"""Operations of all steps of one loop."""


def unroll_loops(program: ExportedProgram) -> None:
    """Writes out the loops of a program, in place. CaptureError, one line, where one is over the batch, or too long."""
    graph = program.graph_module.graph
    loops = [node for node in graph.nodes if node.op == "call_function" and str(node.target) in LOOPS]
    for node in loops:
        _unroll(program.graph_module, node)
    if loops:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


def _unroll(module: fx.GraphModule, node: fx.Node) -> None:
    """Replaces the results of one loop. Of a scan they are those that the last step carries, then what all steps give; steps are
    along dimension 0."""
    what, given = LOOPS[str(node.target)], list[Any](node.args)
    body: Any = getattr(module, given[0].target)
    carried, over, rest = ([], *given[1:3]) if what == "map" else given[1:4]
    length = over[0].meta["val"].shape[0]
    operations = sum(each.op == "call_function" for each in body.graph.nodes)
    where = source_line(node) or "the model"
    if not isinstance(length, int):
        remedy = "use torch.vmap" if what == "map" else "scan along another dimension"
        raise CaptureError(f"{where}: {what} along the batch cannot be captured: {remedy}")
    if length * operations > MOST_NODES:
        raise CaptureError(
            f"{where}: {what} of {length} steps of {operations} operations cannot be captured: write it as operations on whole "
            "tensors, or leave the smallest submodule around it whole: autopar.opaque(module)"
        )
    carried, given_out = list(carried), list[list[fx.Node]]()
    with module.graph.inserting_before(node):
        for step in range(length):
            parts = [_call(module, node, torch.ops.aten.select.int, (each, 0, step)) for each in over]
            results = _inlined(module, node, body, [*carried, *parts, *rest])
            carried, made = results[: len(carried)], results[len(carried) :]
            given_out.append(made)
        stacked = [_call(module, node, torch.ops.aten.stack.default, (list(each), 0)) for each in zip(*given_out, strict=True)]
    found = [*carried, *stacked]
    for user in list(node.users):
        user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index]
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _inlined(module: fx.GraphModule, at: fx.Node, body: fx.GraphModule, operands: list[Any]) -> list[Any]:
    """One step: the results of a body's copy."""
    for node in body.graph.find_nodes(op="get_attr"):
        where = source_line(at) or "the model"
        raise CaptureError(f"{where}: the body of a loop holds the tensor {node.target}: pass it as an operand")
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    results: Any = module.graph.graph_copy(body.graph, copies)
    for node, copied in copies.items():
        if node.op != "placeholder":
            copied.meta = _meta(at, node.meta.get("val"))
    return list(results)


def _call(module: fx.GraphModule, at: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = module.graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda each: each.meta["val"])
    node.meta = _meta(at, target(*values))
    return node


def _meta(at: fx.Node, value: Any) -> dict[str, Any]:
    """Return the metadata of the place where the loop stands: the module and the line of what it is made of."""
    return {**at.meta, "val": value}
