"""Whether a program that was captured in one mode (training or evaluation, of each submodule) computes what the model does in the
other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autopar.capture import capture
from autopar.errors import AutoparError


@dataclass(eq=False)
class CapturedModes:
    """`model` is a copy on the meta device, in the mode in which the graph of this `fingerprint` was captured; the rest are
    arguments of `capture`. Nothing is captured before somebody asks for another mode."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    fingerprint: str
    known: dict[bool, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.args, self.kwargs = tree_map_only(
            torch.Tensor, lambda x: torch.empty_like(x, device="meta"), (self.args, dict(self.kwargs))
        )

    def right_in(self, training: bool) -> bool:
        """Whether the program, switched to this mode, is the model, switched to this mode. A program in evaluation leaves dropout
        out; nothing else of it depends on the mode."""
        if training not in self.known:
            self.known[training] = self._compare(training)
        return self.known[training]

    def _compare(self, training: bool) -> bool:
        modules = list(self.model.modules())
        captured = [module.training for module in modules]
        try:
            self.model.train(training)
            if [module.training for module in modules] == captured:
                return True
            other = self._fingerprint(dropout=True)
        except AutoparError:
            return False
        finally:
            for module, mode in zip(modules, captured, strict=True):
                module.training = mode
        return other == (self.fingerprint if training else self._fingerprint(dropout=False))

    def _fingerprint(self, dropout: bool) -> str:
        return capture(self.model, self.args, self.kwargs, dropout=dropout, **self.options).fingerprint
