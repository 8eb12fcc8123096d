"""Inputs that a call gives as DTensors keep their placements on model axes, and so do the results of the same path."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from autopar.ir.graph import Graph
from autopar.ir.placement import Placement, parse_placement
from autopar.runtime.call_keys import KeyedCall
from autopar.runtime.step.inputs import path_word
from autopar.runtime.step.placed_inputs import model_placements


def placed_values(graph: Graph, call: KeyedCall) -> dict[str, Mapping[str, Placement]]:
    """By name in the graph the placements, by model axis, of what the call gives as DTensors. A result that has the path of such
    an argument (``past_key_values.keys.0``) is what the next call is given, and is placed like it."""
    leaves, _ = tree_flatten_with_path(dict(call.arguments))
    given = {".".join(map(path_word, keys)): _placements(leaf) for keys, leaf in leaves if isinstance(leaf, DTensor)}
    arguments = graph.interface.arguments if given and graph.interface is not None else ()
    out: dict[str, Mapping[str, Placement]] = {each.input: given[each.path] for each in arguments if each.path in given}
    return out | {output.value: given[output.path] for output in (graph.outputs if given else ()) if output.path in given}


def _placements(tensor: DTensor) -> dict[str, Placement]:
    return {axis: parse_placement(text) for axis, text in model_placements(tensor).items()}
