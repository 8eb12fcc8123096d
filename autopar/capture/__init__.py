"""Captures an unmodified model: `torch.export` of its forward, normalized, with repeated layers folded into one block.

Start with `capture`. `tracing` exports the model, `convert` turns the exported program into a flat graph, `normalize` rewrites
it to the operations that rules know, `fold` finds repeated layers. `models` has the bundled models. Imports `ir` and torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.convert import flatten_program
from autopar.capture.fold import fold
from autopar.capture.normalize import normalize
from autopar.capture.normalize.simplify import without_dropout
from autopar.capture.tracing.outline import CannotOutline
from autopar.capture.tracing.trace import LossFunction, Results, trace
from autopar.errors import CaptureError
from autopar.ir.graph import Graph

__all__ = ["capture"]

LOSS_OUTSIDE = (
    "the loss is computed outside of the program: neither pipelines nor micro-batches (loss_fn= puts it into the program)"
)


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compute_dtype: str | None = None,
    allowed_functions: tuple[str, ...] = (),
    outputs: Sequence[str] = (),
    batch_norm: str = "global",
    dropout: bool = True,
    loss_fn: LossFunction | None = None,
    usual_kind: str = "",
) -> Graph:
    """The graph of the forward of `model` up to its loss. The model is not changed and may be on the meta device.

    A model without a loss returns its outputs, which take gradients; `loss_fn` makes a loss of its result and of a further
    argument ``target``. Example inputs that require gradients get them.

    `compute_dtype` (``bfloat16``) is the dtype in which floating-point parameters enter the forward. `allowed_functions` are
    names of ``autograd.Function`` classes that may be traced through. `outputs` are fields of the model's result (``logits``,
    ``hidden_states.1``) that are returned beside the loss, each with or without how it comes back (``logits:dtensor``, see
    `ir.interface.OUTPUT_KINDS`; `usual_kind` where that is not said). With ``batch_norm="local"`` batch norm has the statistics
    of each data rank's own examples, as in DDP. ``dropout=False`` leaves dropout out, as a program in evaluation does.

    CaptureError, one line, with the user's file and line.
    """
    if batch_norm not in ("global", "local"):
        raise CaptureError(f"batch_norm={batch_norm!r} is not known: write global or local")
    results = Results(tuple(outputs), usual_kind, loss_fn)
    given = (model, args, kwargs or {}, compute_dtype, allowed_functions)
    try:
        traced = trace(*given, results=results)
        flat = flatten_program(traced)
    except CannotOutline:
        traced = trace(*given, outlined=False, results=results)
        flat = flatten_program(traced)
    flat = flat if dropout else without_dropout(flat)
    if not traced.interface.has_loss:
        flat = replace(flat, notes=(*flat.notes, LOSS_OUTSIDE))
    return fold(model, normalize(flat, batch_norm == "local"), traced)
