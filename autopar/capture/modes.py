"""Whether a program that was captured in one mode (training or evaluation, of each submodule) computes what the model does in the
other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autopar.capture import capture
from autopar.capture.flat import rewritten
from autopar.capture.normalize.simplify import node_without_dropout
from autopar.errors import AutoparError
from autopar.ir.graph import Block, Graph
from autopar.runtime.plain.plain_model import preserved_modes


@dataclass(eq=False)
class CapturedModes:
    """`model` is a copy on the meta device, in the mode in which `graph` was captured; the rest are arguments of `capture`.
    Nothing is captured before somebody asks for another mode."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    graph: Graph
    answers: dict[bool, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty: dict[int, torch.Tensor] = {}  # one for a tensor that is passed twice
        self.args, self.kwargs = tree_map_only(
            torch.Tensor,
            lambda x: empty.setdefault(id(x), torch.empty_like(x, device="meta")),
            (self.args, dict(self.kwargs)),
        )

    def right_in(self, training: bool) -> bool:
        """Whether the program, switched to this mode, is the model, switched to this mode. A program in evaluation leaves dropout
        out; nothing else of it depends on the mode."""
        if training not in self.answers:
            self.answers[training] = self._compare(training)
        return self.answers[training]

    def _compare(self, training: bool) -> bool:
        captured = [module.training for module in self.model.modules()]
        try:
            with preserved_modes(self.model):
                self.model.train(training)
                if [module.training for module in self.model.modules()] == captured:
                    return True
                other = self._captured(dropout=True)
        except AutoparError:
            return False
        if training:
            return other.fingerprint == self.graph.fingerprint
        if _canonical(other) == _canonical(without_dropout(self.graph)):
            return True
        return other.fingerprint == self._captured(dropout=False).fingerprint  # its values may just have other names

    def _captured(self, dropout: bool) -> Graph:
        return capture(self.model, self.args, self.kwargs, dropout=dropout, **self.options)


def without_dropout(graph: Graph) -> Graph:
    """The graph with dropout left out, attention's too, as a program in evaluation does."""
    return replace(graph, blocks=tuple(_block_without_dropout(block) for block in graph.blocks))


def _block_without_dropout(block: Block) -> Block:
    nodes, names = rewritten(block.nodes, node_without_dropout)
    return replace(
        block,
        nodes=nodes,
        outputs=tuple(names.get(name, name) for name in block.outputs),
        updates=tuple((buffer, names.get(name, name)) for buffer, name in block.updates),
    )


def _canonical(graph: Graph) -> tuple[object, ...]:
    """All that a graph computes, with the values between calls numbered."""
    numbers: dict[str, int] = {value.name: number for number, value in enumerate(graph.inputs)}
    calls = []
    for call in graph.calls:
        made = [numbers.setdefault(name, len(numbers)) for name in call.outputs]
        calls.append((call.block, call.prefix, [numbers[name] for name in call.inputs], made, call.parameters))
    blocks = [replace(block, nodes=tuple(replace(node, module="", source="") for node in block.nodes)) for block in graph.blocks]
    results = [numbers[name] for name in graph.results]
    return graph.inputs, blocks, calls, results, [each.asked for each in graph.outputs]
