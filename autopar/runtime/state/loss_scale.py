"""The factor of the loss in float16 (``torch.amp.GradScaler``), where gradients are spread over ranks and computed early.

A gradient that is not finite on one rank counts on all of them: DTensor looks at the placements of the first gradient of each
dtype (2.13.0), and a stage of a pipeline at its own gradients. The ranks agree once in each `unscale_`, so all skip the same step
and keep the same scale.

Steps in micro-batches and pipelines run their backwards inside the call, when nobody knows yet by what a scaler multiplies the
loss. In float16 small gradients would vanish: they are computed with the factor of the step before, and what the loss's backward
then brings is divided by it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.heartbeat import watched
from .gradient import name_of
from .stage_tensors import holders_of

USUAL = 2.0**15
"""The factor in the first step; a `GradScaler` starts with twice as much."""


class LossScale:
    """The factor of the loss. `used`: the one of the step that runs, equal on all ranks."""

    def __init__(self, compute: str) -> None:
        self.half = compute == "float16"
        self.used, self.next = 1.0, USUAL if self.half else 1.0

    def begin(self, loss_dtype: str) -> None:
        """Choose the factor before the backwards of a step."""
        self.used = min(self.next, USUAL) if loss_dtype == "float16" else self.next

    def gradient(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the loss of a micro-batch; None for 1."""
        return torch.full_like(loss, self.used) if self.used != 1.0 else None

    def factor(self, gradient: torch.Tensor, used: float) -> torch.Tensor:
        """Return the factor of gradients that were computed with `used`, where `gradient` is that of the loss."""
        if not self.half:
            return gradient
        value = float(gradient.detach())
        if 0.0 < value < float("inf"):
            self.next = value
        return gradient / used


def agree_on_overflow(optimizer: torch.optim.Optimizer, flags: dict[torch.device, torch.Tensor], none: torch.Tensor) -> None:
    """Make all ranks skip the same steps of an optimizer that has parameters of a parallel model. `flags`: by device, whether
    gradients are not finite (1) or are (0); empty where there are none. `none`: a 0."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(name_of, parameters)) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    seen = torch.stack([none.new_tensor(float(bool(flags))), *(each.to(none.device).reshape(()) for each in flags.values())])
    seen = torch.stack([seen[0], seen[1:].amax() if flags else none.reshape(())])
    holders = next(filter(None, map(holders_of, parameters)), None)
    with watched(holders and holders.pipeline.heartbeat, "GradScaler.unscale_"):
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    if seen[0] and not flags:  # torch refuses a step without any gradients
        flags[none.device] = none.clone()
    for flag in flags.values():
        flag.fill_(float(seen[1]))
