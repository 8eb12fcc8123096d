"""From an unmodified model to the folded graph of its forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.capture.convert import convert
from autopar.capture.fold import fold
from autopar.capture.normalize import normalize
from autopar.capture.outline import CannotOutline
from autopar.capture.trace import trace
from autopar.errors import CaptureError
from autopar.ir.graph import Graph

__all__ = ["capture"]


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compute_dtype: str | None = None,
    allowed_functions: tuple[str, ...] = (),
    outputs: Sequence[str] = (),
    batch_norm: str = "global",
) -> Graph:
    """Captures the forward of `model` up to its loss. The model is not touched and may be on the meta device.

    `compute_dtype` (``bfloat16``) is the dtype in which floating parameters enter the forward. `allowed_functions` are names of
    ``autograd.Function`` classes that may be traced through. `outputs` are fields of the model's result (``logits``,
    ``hidden_states.1``) that are wanted beside the loss. `batch_norm` is ``local`` where its
    statistics are to be those of each data rank's own examples. Errors: CaptureError, one line with the user's file and line.
    """
    if batch_norm not in ("global", "local"):
        raise CaptureError(f"batch_norm={batch_norm!r} is not known: write global or local")
    given = (model, args, kwargs or {}, compute_dtype, allowed_functions)
    try:
        traced = trace(*given, asked=tuple(outputs))
        flat = convert(traced)
    except CannotOutline:
        traced = trace(*given, outlined=False, asked=tuple(outputs))
        flat = convert(traced)
    return fold(model, normalize(flat, batch_norm == "local"), traced)
