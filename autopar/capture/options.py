"""The options of a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.capture.bind import BatchDim

LossFunction = Callable[[Any, Any], Any]
"""A function from the model's result and a target to the loss, as torch's pipeline schedules take it."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The options of `autopar.capture.capture`."""

    compute_dtype: str | None = None
    allowed_functions: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    batch_norm: str = "global"
    dropout: bool = True
    loss_fn: LossFunction | None = None
    usual_kind: str = ""
    batch_dim: BatchDim = None
    autocast: str = ""
    float8: bool = False
    where_returned: tuple[str, ...] = ()
    """Further outputs, of which the result may lack some."""
