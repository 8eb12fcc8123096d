"""The model with its loss as one module, of a dictionary of tensors, as `torch.export` gets it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.bind import TARGET, BoundInputs, batch_of
from autopar.capture.options import CaptureOptions, LossFunction
from autopar.capture.results.returned import Returned, leaves_of, take_apart
from autopar.capture.state.buffers import assigned_buffers
from autopar.capture.state.python_state import PlainState
from autopar.capture.state.reads import ReadRecord, call_recorded
from autopar.capture.state.second_call import refuse_states
from autopar.capture.tracing.data.varlen import VarlenAttention, under_mask
from autopar.capture.tracing.equal_layers import EqualLayers, as_if_first
from autopar.errors import CaptureError
from autopar.ir.interface import Form

ResultForm = tuple[Form, tuple[str, ...], tuple[str, ...]]
"""The form of the model's result, what is returned after the loss, and the paths of what is left out."""


class LossOnly(nn.Module):
    """Calls the model, and the loss function where there is one, with one dictionary of tensors; returns the scalar loss, and
    the requested outputs."""

    def __init__(
        self,
        model: nn.Module,
        bound: BoundInputs,
        compute_dtype: torch.dtype | None,
        options: CaptureOptions,
        tell: Callable[[ResultForm], None],
        warn: Callable[[tuple[str, ...]], None],
    ) -> None:
        super().__init__()
        self.module = model
        self.state = PlainState(model, options.loss_fn)
        self.layers: Sequence[EqualLayers] = ()
        self.bound = bound
        self.compute_dtype = compute_dtype
        self.options = options
        self.tell, self.warn = tell, warn  # export undoes what a forward writes into attributes

    def forward(self, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        dtype = self.compute_dtype
        if dtype is not None:  # as FSDP2's mixed precision does (cast_forward_inputs)
            batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        buffers = {buffer: buffer._version for buffer in self.module.buffers()}
        with VarlenAttention(under_mask(self.examples(batch))):
            with self.state.restored():
                before = self.state.leaves()
                result, record = call_recorded(self.module, lambda: self.call(batch))
                changes = self.state.changes(before, record)
            if not all(each.reset for each in changes):
                written = [buffer for buffer, version in buffers.items() if buffer._version != version]
                varying = (*batch.values(), *written, *(each for each in self.module.parameters() if each.requires_grad))

                def repeat() -> tuple[tuple[Tensor, ...], ReadRecord]:
                    own = {name: x.clone() for name, x in batch.items()}
                    with as_if_first(self.layers):
                        result, record = call_recorded(self.module, lambda: self.call(own))
                    returned = self.take_apart(result, own)
                    return (returned.loss, *returned.outputs.values(), *written), record

                self.warn(refuse_states(self.state, changes, varying, repeat))
        returned = self.take_apart(result, batch)
        self.tell((returned.form, tuple(f"{path}:{kind}" for path, kind in returned.kinds.items()), returned.left_out))
        return (returned.loss, *returned.outputs.values()) if returned.outputs else returned.loss

    def call(self, batch: Mapping[str, Tensor]) -> Any:
        """The result of the model, or of the loss function."""
        arguments = self.bound.arguments(batch)
        loss_fn = self.options.loss_fn
        target = arguments.pop(TARGET) if loss_fn is not None else None
        with assigned_buffers(self.module) as refuse_old:
            result = self.module(**arguments)
            refuse_old(leaves_of(result))
        return result if loss_fn is None else loss_fn(result, target)

    def take_apart(self, result: Any, batch: Mapping[str, Tensor]) -> Returned:
        """The loss and the outputs of a result for a batch."""
        module = self.module if self.options.loss_fn is None else None
        if module is not None and type(result) is tuple and len(result) > 2 and self.bound.shifts_places:
            raise CaptureError(
                f"{type(module).__name__} returns a tuple without the key-value cache that it would have made, so that what "
                "follows has other places: pass return_dict=True, or use_cache=False"
            )
        return take_apart(
            result, self.options.outputs, self.options.usual_kind, module,
            where_returned=self.options.where_returned, lacks_cache=self.bound.lacks_cache, inputs=self.batched(batch),
        )  # fmt: skip

    def examples(self, batch: Mapping[str, Tensor]) -> int | torch.SymInt:
        """The number of examples of a batch."""
        return next((x.shape[0] for x in self.batched(batch).values()), batch_of(self.bound.tensors))

    def batched(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs that have the examples at dimension 0."""
        tensors = self.bound.tensors
        size = batch_of(tensors)
        return {name: x for name, x in batch.items() if x.dim() and tensors[name].shape[0] == size}


def check_loss_function(loss_fn: LossFunction | None) -> None:
    """CaptureError where the loss function has a state of its own, or takes other arguments than the result and a target."""
    if loss_fn is None:
        return
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError(f"loss_fn: {name} has parameters, which nobody would train: make it part of the model")
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):  # a builtin function
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise CaptureError(
            f"loss_fn: {name}{signature} is called with the model's result and {TARGET}: let it take these two, with a tuple for "
            f"several ({TARGET}=(labels, weights))"
        ) from None
