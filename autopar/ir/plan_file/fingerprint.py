"""Fingerprints of a graph: what it computes and how it is called, as short texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from autopar.ir.graph import Graph
from autopar.ir.interface import Interface
from autopar.ir.plan_file.codec import encode
from autopar.ir.plan_file.saved_tensors import SavedTensors


def graph_fingerprint(graph: Graph) -> str:
    """16 hexadecimal digits, equal for equal models and shapes.

    Everything counts but the size of a symbolic batch and what only people read: the name, notes, module paths and source lines,
    and the class that the call returns.
    """
    blocks = (replace(block, nodes=tuple(replace(node, module="", source="") for node in block.nodes)) for block in graph.blocks)
    interface = graph.interface or Interface()
    parts = (
        interface.positional,
        graph.inputs,
        [encode(block) for block in blocks],
        graph.calls,
        graph.loss,
        graph.outputs,
        [encode(each) for each in interface.arguments if not each.optional],
        graph.batch_is_symbolic,
    )
    return _digest((parts, None if graph.batch_is_symbolic else graph.batch))


def checksum(graph: Graph) -> str:
    """16 hexadecimal digits of all that a file says of a graph, with what `graph_fingerprint` leaves out: names, notes, sources,
    the arguments that may be left out, and the form of the result. They differ between versions of a library and between scripts
    for models that compute the same, so a captured model is not compared with them; a file that is used without its model is."""
    return _digest(encode(replace(graph, checksum="")))


def saves_checksum(saves: Mapping[str, SavedTensors]) -> str:
    """16 hexadecimal digits of what autograd saves, as a file says it: who edits it has it observed anew."""
    return _digest([(key, encode(saved)) for key, saved in saves.items()]) if saves else ""


def _digest(data: object) -> str:
    return hashlib.sha256(msgspec.json.encode(data)).hexdigest()[:16]
