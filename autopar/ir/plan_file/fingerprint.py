"""The fingerprint of a graph: what it computes and how it is called, as one short text."""

from __future__ import annotations

import hashlib

import msgspec

from autopar.ir.graph import Graph
from autopar.ir.plan_file.codec import encode_graph


def graph_fingerprint(graph: Graph) -> str:
    """16 hexadecimal digits, equal for equal models and shapes.

    Everything counts but the size of a symbolic batch and what only people read: the name, notes, module paths and source lines,
    and the class that the call returns.
    """
    document = encode_graph(graph)
    blocks = tuple(
        msgspec.structs.replace(block, nodes=tuple(msgspec.structs.replace(node, module="", source="") for node in block.nodes))
        for block in document.blocks
    )
    arguments = () if document.interface is None else tuple(each for each in document.interface.arguments if not each.optional)
    positional = () if document.interface is None else document.interface.positional
    parts = (
        positional,
        document.inputs,
        blocks,
        document.calls,
        document.loss,
        document.outputs,
        arguments,
        document.batch_is_symbolic,
    )
    fixed = None if document.batch_is_symbolic else document.batch
    return hashlib.sha256(msgspec.json.encode((parts, fixed))).hexdigest()[:16]
