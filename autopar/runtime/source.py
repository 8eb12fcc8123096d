"""Full tensors by original name, for `state.materialize`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name, under every name that a tied one has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


class FirstRank:
    """Tensors as rank 0 has them: models that were initialised with different seeds still start from one state.

    Every rank asks for the same names in the same order; ranks other than 0 need shapes and dtypes only.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, name: str) -> torch.Tensor:
        mine = self.tensors[name].detach()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return mine
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        full = mine.to(device).contiguous() if dist.get_rank() == 0 else torch.empty(mine.shape, dtype=mine.dtype, device=device)
        dist.broadcast(full, src=0)
        return full
