"""Captures an unmodified model: `torch.export` of its forward, normalized, with repeated layers folded into one block.

Start with `export`. `tracing` exports the model, `convert` turns the exported program into a flat graph, `normalize` rewrites
it to the operations that rules know, `fold_layers` finds repeated layers. `models` has the bundled models. Imports `ir` and
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.capture.export import LOSS_OUTSIDE, Export
from autopar.capture.options import CaptureOptions, LossFunction
from autopar.capture.tracing.fake_copy import device_of
from autopar.ir.graph import Graph
from autopar.runtime.device.autocast import autocast_of

__all__ = ["LOSS_OUTSIDE", "capture", "current_autocast"]


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
    batch_dim: int | Mapping[str, int] | tuple[tuple[str, int], ...] | None = None,
    autocast: str | None = None,
    float8: bool = False,
) -> Graph:
    """The graph of the forward of `model` up to its loss. The model is not changed and may be on the meta device.

    A model without a loss returns its outputs, which take gradients; `loss_fn` makes a loss of its result and of a further
    argument ``target``. Example inputs that require gradients get them.

    `compute_dtype` (``bfloat16``) is the dtype in which floating-point parameters enter the forward. `allowed_functions` are
    names of ``autograd.Function`` classes that may be traced through. `outputs` are fields of the model's result (``logits``,
    ``hidden_states.1``) that are returned beside the loss, each with or without how it comes back (``logits:dtensor``, see
    `ir.interface.OUTPUT_KINDS`; `usual_kind` where that is not said). With ``batch_norm="local"`` batch norm has the statistics
    of each data rank's own examples, as in DDP. ``dropout=False`` leaves dropout out, as a program in evaluation does.

    `batch_dim` is where inputs have the batch, if not at dimension 0: all of them, or by argument (``{"src": 1}``). Where nobody
    says it, it is read from the sizes, and the plan notes it. `autocast` is the dtype of the ``torch.autocast`` under which the
    forward runs, empty for none; by default the active one. With `float8` linear modules of layers multiply in float8.

    CaptureError, one line, with the user's file and line.
    """
    dims = tuple(batch_dim.items()) if isinstance(batch_dim, Mapping) else batch_dim
    cast = current_autocast(model) if autocast is None else autocast
    options = CaptureOptions(
        compute_dtype, allowed_functions, tuple(outputs), batch_norm, dropout, loss_fn, usual_kind, dims, cast, float8
    )  # fmt: skip
    return Export(model, args, kwargs or {}, options).graph


def current_autocast(model: nn.Module) -> str:
    """The dtype of the ``torch.autocast`` that is active where the model runs, or an empty string."""
    return autocast_of(device_of(model).type)
