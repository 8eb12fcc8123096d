"""Models that are called with, or return, more than tensors: captured and planned here, run on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import Graph
from autopar.program.build import program_text
from support.harness.end_to_end import plan
from support.harness.training_loop import graph_state


@dataclass(frozen=True, slots=True)
class Case:
    """What `endtoend.plan` and `endtoend.program` want of a model."""

    graph: Graph
    state: dict[str, Tensor]

    @property
    def form(self) -> Any:
        """Of what the model returns."""
        assert self.graph.interface is not None
        return self.graph.interface.returns

    def text(self, **force: int) -> str:
        """The program of a forced plan on 4 ranks."""
        found = plan(self, force)  # type: ignore[arg-type]
        return program_text(found.graph or self.graph, found.candidate)


def case_of(
    model: nn.Module, args: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None, outputs: Sequence[str] = ()
) -> Case:
    """Captured as it is."""
    graph = capture(model, args, keywords, outputs=outputs)
    return Case(graph, graph_state(graph, model))
