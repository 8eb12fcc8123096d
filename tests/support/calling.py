"""Models that are called with, or return, more than tensors: captured and planned here, run on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.endtoend import loss_of, plan
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import Graph
from autopar.passes.pipeline import lower
from autopar.program.source import render


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
        return render(lower(found.graph or self.graph, found.candidate))


def case_of(
    model: nn.Module, args: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None, outputs: Sequence[str] = ()
) -> Case:
    """Captured as it is."""
    graph = capture(model, args, keywords, outputs=outputs)
    named = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return Case(graph, {name: named[name] for name in graph.parameters()})


def started(text: str, state: Mapping[str, Tensor], form: Any = None) -> Any:
    """On a rank: the program as the user has it."""
    from autopar.program.build import load
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    made = load(text).Program
    return Parallel(made(MeshHandle(made.mesh_axes)), state, form=form)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Full gradients by name, of one process or of a parallel model."""
    if hasattr(model, "full_gradients"):
        return model.full_gradients()  # type: ignore[no-any-return,operator]
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def trained(model: nn.Module, calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], rate: float = 1e-3) -> Any:
    """Losses, the first step's gradients, then state, of some steps of AdamW: one for each call."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses, first = [], None
    for args, keywords in calls:
        optimizer.zero_grad()
        loss = loss_of(model(*args, **keywords))
        loss.backward()
        losses.append(loss.item())
        first = first or gradients(model)
        optimizer.step()
    state = model.full_state() if hasattr(model, "full_state") else model.state_dict()  # type: ignore[operator]
    return losses, first, {name: tensor.detach().clone() for name, tensor in state.items()}


def on_ranks(cases: Sequence[tuple[str, Mapping[str, Tensor], Any]]) -> list[Any]:
    """On a rank: `trained` of several programs (text, state, calls)."""
    return [trained(started(text, state), calls) for text, state, calls in cases]


def differing(found: Any, expected: Any, tolerance: float = 1e-9) -> list[str]:
    """What differs of two `trained`; a state dict may lack what training does not need."""
    out = [f"loss {a} for {b}" for a, b in zip(found[0], expected[0], strict=True) if not abs(a - b) <= tolerance * abs(b)]
    if found[1].keys() != expected[1].keys():
        out.append(f"gradients of {sorted(found[1].keys() ^ expected[1].keys())} on one side only")
    for kind, mine, theirs in (("gradient", found[1], expected[1]), ("state", found[2], expected[2])):
        for name in mine.keys() & theirs.keys():
            scale = max(float(theirs[name].double().abs().max()) if theirs[name].numel() else 0.0, 1e-9)
            error = float((mine[name].double() - theirs[name].double()).abs().max()) / scale if theirs[name].numel() else 0.0
            if not error <= tolerance:
                out.append(f"{kind} {name} off by {error:.2g}")
    return out
