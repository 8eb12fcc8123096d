"""A copy of a parallel model with weights of its own: `copy.deepcopy`, and so `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from .comm.peer_watch import PATIENCE_SECONDS

_Model = TypeVar("_Model", bound=Any)


def copied(parallel: _Model) -> _Model:
    """Another model of the same program on the same mesh, with the same values. All ranks must call."""
    state, heartbeat = parallel.state, parallel.heartbeat
    plain = None if parallel.plain is None else parallel.plain.copied()
    kinds = type(parallel.program).__mro__  # FSDP2 changes the class
    made: Any = next(kind for kind in kinds if not issubclass(kind, FSDPModule))

    def source(name: str) -> torch.Tensor:
        unused = {} if plain is None else plain.unused
        found: torch.Tensor = state.broadcast_full(name) if name in state.index.specs else unused[name]
        return found

    if plain is not None:
        plain.training = parallel.training
    out: _Model = type(parallel)(
        made(parallel.program.mesh), source, compile=parallel.compiler, form=parallel.calls.first.form, plain=plain,
        patience_seconds=PATIENCE_SECONDS if heartbeat is None else heartbeat.patience_seconds,
        check_batch_every=parallel.calls.check_batch_every, check_every=parallel.calls.checks.every, plan=parallel.plan,
        make_variant=None if parallel.variants is None else parallel.variants.make,
    )  # fmt: skip
    if parallel.variants is not None and out.variants is not None:
        out.variants.known.update(
            (key, out.calls.first) for key, each in parallel.variants.known.items() if each is parallel.calls.first
        )
        for mine, theirs in zip(out.calls.nodes, parallel.calls.nodes, strict=True):
            mine.training = theirs.training
    for name, parameter in state.parameters.items():
        out.state.parameters[name].requires_grad_(parameter.requires_grad)
    if out.variants is None and out.training != parallel.training:
        out.train(parallel.training)
    return out
