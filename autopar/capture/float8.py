"""Linear layers whose products are in float8 (torchao's dynamic scaling of whole tensors): those of layers (blocks that
repeat, or lie in a list), as float8 recipes have it; the head and whatever stands alone stay in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import CaptureError
from autopar.ir.dims import Shape
from autopar.ir.graph import Block, Graph, Node, Ref
from autopar.ir.plan_file.codec import graph_fingerprint
from autopar.operations.products import LINEAR, LINEAR_FLOAT8
from autopar.operations.table import operation

MULTIPLE = 16
"""The divisor of the sizes of a float8 weight (torch's ``_scaled_mm``)."""
NOTE = "float8 products"


def with_float8_products(graph: Graph) -> Graph:
    """The graph whose ``aten.linear`` in layers is ``ap.linear_float8_dynamic``, where sizes allow it. A note says which
    products with weights stay as they are. CaptureError where that is all of them."""
    left: list[str] = []
    layers = {call.block for call in graph.calls if call.prefix.rpartition(".")[2].isdigit() or graph.count(call.block) > 1}

    def rewritten(block: Block) -> Block:
        if block.name not in layers:
            left.extend(_place(node) for node in block.nodes if _has_weight(node))
            return block
        shapes = {value.name: value.shape for value in (each.value for each in block.parameters)}
        shapes |= {value.name: value.shape for node in block.nodes for value in node.outputs}
        return replace(block, nodes=tuple(_node(node, shapes, left) for node in block.nodes))

    blocks = tuple(map(rewritten, graph.blocks))
    kept = ", ".join(dict.fromkeys(left))
    if not any(node.op == LINEAR_FLOAT8 for block in blocks for node in block.nodes):
        raise CaptureError(
            f'no product of {graph.name} can be in float8{f" (not {kept})" if kept else ""}: take precision "bf16"'
        )
    said = f"{NOTE}: the linear modules of layers" + (f"; not {kept}" if kept else "")
    made = replace(graph, blocks=blocks, notes=(*graph.notes, said), fingerprint="")
    return replace(made, fingerprint=graph_fingerprint(made))


def _node(node: Node, shapes: Mapping[str, Shape], left: list[str]) -> Node:
    if node.op != LINEAR:
        if _has_weight(node):
            left.append(f"{_place(node)} ({node.op.partition('.')[2]})")
        return node
    weight = node.args[1]
    sizes = shapes.get(weight.name, ()) if isinstance(weight, Ref) else ()
    if len(sizes) != 2 or any(not isinstance(size, int) or size % MULTIPLE for size in sizes):
        left.append(f"{_place(node)} (sizes {tuple(sizes)} are no multiples of {MULTIPLE})")
        return node
    return replace(node, op=LINEAR_FLOAT8)


def _has_weight(node: Node) -> bool:
    record = operation(node.op)
    return record.linear or record.experts


def _place(node: Node) -> str:
    return node.module or node.source or node.name
