"""Fingerprints of a graph: what it computes and how it is called, as short texts."""

from __future__ import annotations

import hashlib

import msgspec

from autopar.ir.graph import Graph
from autopar.ir.plan_file.codec import encode_graph
from autopar.ir.plan_file.document import GraphDoc


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
    return _digest((parts, fixed))


def checksum(document: GraphDoc) -> str:
    """16 hexadecimal digits of all that a file says of a graph, with what `graph_fingerprint` leaves out: names, notes, sources,
    the arguments that may be left out, and the form of the result. They differ between versions of a library and between scripts
    for models that compute the same, so a captured model is not compared with them; a file that is used without its model is."""
    return _digest(msgspec.structs.replace(document, checksum=""))


def _digest(data: object) -> str:
    return hashlib.sha256(msgspec.json.encode(data)).hexdigest()[:16]
