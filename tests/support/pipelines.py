"""Pipelines of small models: the plan of one stage's mesh, cut into chunks and put on a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.endtoend import Outcome, Prepared, plan
from torch import Tensor

from autopar.cost_models.hardware import Cluster
from autopar.ir.divide import divided
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.stages import repeatable
from autopar.passes.pipeline import lower
from autopar.program.source import render
from autopar.schedules.build import schedule_of


def parted(prepared: Prepared, block: str, places: Sequence[int]) -> Prepared:
    """With one block divided."""
    return replace(prepared, graph=divided(prepared.graph, block, places))


def piped(prepared: Prepared, force: dict[str, int], pipeline: Pipeline, micro_batches: int) -> Candidate:
    """The search's answer for the mesh of one stage, on every stage; what can be is made by every chunk for itself."""
    stage = {"dp": 1, "tp": 1} | force
    size = stage["dp"] * stage["tp"]
    found = plan(prepared, {"zero": 0, **stage}, Cluster.parse(f"local:{size}")).candidate
    pipeline = replace(pipeline, repeated=tuple(repeatable(prepared.graph)))
    return replace(found, micro_batches=micro_batches, pipeline=pipeline)


def text_of(prepared: Prepared, candidate: Candidate) -> str:
    return render(lower(prepared.graph, candidate))


def planned_order(candidate: Candidate) -> list[list[str]]:
    """The computing actions of each stage."""
    return [[str(action) for action in rank] for rank in schedule_of(candidate.pipeline, candidate.micro_batches).ranks]


def run_pipelines(
    cases: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]], steps: int = 3, rate: float = 1e-3
) -> list[tuple[Outcome, list[str]]]:
    """On a rank: each program trained for some steps; what every rank knows of the whole, and the actions of its last step."""
    import torch

    from autopar.program.build import load
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    out: list[tuple[Outcome, list[str]]] = []
    for text, state, batch in cases:
        made: Any = load(text).Program
        parallel = Parallel(made(MeshHandle(made.mesh_axes)), state)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=rate)
        first: tuple[float, dict[str, Tensor]] | None = None
        for _ in range(steps):
            optimizer.zero_grad()
            loss = parallel(**batch)
            loss.backward()
            if first is None:
                first = loss.item(), parallel.full_gradients()
            optimizer.step()
        assert first is not None
        whole = parallel.full_state()
        out.append(((*first, whole, {}), list(parallel.trace())))
    return out
