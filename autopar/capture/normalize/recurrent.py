"""Recurrent nets with dropout between their layers: one operation for each layer, and dropout between them. This function takes
the place of torch's operations when an exported program is taken
apart (`tracing.decomposition`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

RECURRENT = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")


def is_fixed_recurrent(op: str, args: Sequence[Any]) -> bool:
    """Return whether this is a recurrent net without dropout between its layers: torch tags all of them as random."""
    if op not in RECURRENT:
        return False
    layers, dropout, train = args[4:7]
    return layers == 1 or not dropout or not train


def recurrent_nets() -> Mapping[Any, Callable[..., Any]]:
    """Return the operations of torch, each with the function that takes its place."""
    aten = torch.ops.aten
    nets = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    return {net: partial(_layer_by_layer, net) for net in nets}


def _layer_by_layer(net: Any, x: Tensor, states: Any, parameters: Sequence[Tensor], *options: Any) -> Any:
    biases, layers, dropout, train, both, batch_first = options
    if not dropout or not train or layers == 1:
        return NotImplemented  # it stays as it is
    several = isinstance(states, tuple | list)
    ways, per_layer = 2 if both else 1, len(parameters) // layers
    last: list[list[Tensor]] = [[] for _ in (states if several else (states,))]
    for layer in range(layers):
        own = [state[layer * ways : (layer + 1) * ways] for state in (states if several else (states,))]
        weights = parameters[layer * per_layer : (layer + 1) * per_layer]
        x, *new = net(x, own if several else own[0], weights, biases, 1, 0.0, train, both, batch_first)
        for parts, state in zip(last, new, strict=True):
            parts.append(state)
        x = torch.dropout(x, dropout, True) if layer + 1 < layers else x
    return x, *(torch.cat(parts) for parts in last)
