"""Full tensors by original name, for `state.materialize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from .errors import StateProblem

Source = Callable[[str], torch.Tensor] | Mapping[str, torch.Tensor]
"""Full tensors by original name."""


def ask(source: Source, name: str) -> torch.Tensor:
    """The full tensor. StateProblem where there is none."""
    try:
        return source[name] if isinstance(source, Mapping) else source(name)
    except KeyError:
        raise StateProblem(f"the state has no {name!r}; pass the state dict of the model that was planned") from None


class InTurn:
    """Asks a source for all `names` in their order, on every rank alike, and keeps what of them is `mine` until it is asked for.

    What is asked for in another order waits here, so the orders should be nearly one. A mapping is only looked into.
    """

    def __init__(self, source: Source, names: Iterable[str], mine: Iterable[str]) -> None:
        self.source, self.left, self.mine = source, iter(tuple(names)), frozenset(mine)
        self.kept: dict[str, torch.Tensor] = {}
        if isinstance(source, Mapping):
            for name in self.left:
                if name not in source:
                    ask(source, name)

    def __call__(self, name: str) -> torch.Tensor:
        if isinstance(self.source, Mapping):
            return ask(self.source, name)
        while name not in self.kept:
            self._next(next(self.left))
        return self.kept.pop(name)

    def _next(self, name: str) -> None:
        full = ask(self.source, name)
        if name in self.mine:
            self.kept[name] = full

    def finish(self) -> None:
        """Asks for what is left, as other ranks do."""
        for name in self.left:
            self._next(name)


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
