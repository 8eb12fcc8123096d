"""Where full tensors come from when a program is filled: a mapping or a function by original name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..errors import StateProblem

WeightSource = Callable[[str], torch.Tensor] | Mapping[str, torch.Tensor]
"""Full tensors by original name."""


def full_weight(source: WeightSource, name: str) -> torch.Tensor:
    """The full tensor. StateProblem if there is none."""
    try:
        return source[name] if isinstance(source, Mapping) else source(name)
    except KeyError:
        raise StateProblem(f"the state has no {name!r}; pass the state dict of the model that was planned") from None


class OrderedSource:
    """Asks a source for all `names` in one order on every rank, and holds those in `wanted` until they are asked for.

    Tensors that are asked for in another order are held here, so the orders should be nearly equal. A mapping is read directly.
    """

    def __init__(self, source: WeightSource, names: Iterable[str], wanted: Iterable[str]) -> None:
        self.source, self.names, self.wanted = source, iter(tuple(names)), frozenset(wanted)
        self.held: dict[str, torch.Tensor] = {}
        if isinstance(source, Mapping):
            for name in self.names:
                if name not in source:
                    full_weight(source, name)

    def __call__(self, name: str) -> torch.Tensor:
        if isinstance(self.source, Mapping):
            return full_weight(self.source, name)
        while name not in self.held:
            self._next(next(self.names))
        return self.held.pop(name)

    def _next(self, name: str) -> None:
        full = full_weight(self.source, name)
        if name in self.wanted:
            self.held[name] = full

    def finish(self) -> None:
        """Asks for the remaining names, as other ranks do."""
        for name in self.names:
            self._next(name)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name, under every name that a tied one has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


class BroadcastSource:
    """Broadcasts the tensors of rank 0, so that models which were initialised with different seeds start from one state.

    Every rank asks for the same names in the same order; ranks other than 0 need shapes and dtypes only.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, name: str) -> torch.Tensor:
        own = self.tensors[name].detach()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        full = own.to(device).contiguous() if dist.get_rank() == 0 else torch.empty(own.shape, dtype=own.dtype, device=device)
        dist.broadcast(full, src=0)
        return full
