"""``Function.apply`` with a type: torch's own is untyped."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """What the function's forward returns, recorded for the backward."""
    return function.apply(*args)
