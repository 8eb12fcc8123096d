"""Exports a copy of the model with `torch.export`, on fake tensors of its device; the model itself is never changed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from autopar.capture.bind import BoundInputs, batch_of, bind_inputs
from autopar.capture.control_flow import unroll_loops
from autopar.capture.options import CaptureOptions
from autopar.capture.state.buffers import merge_buffers, refuse_gradients, refuse_shared_buffers
from autopar.capture.tracing.data.batch_questions import (
    ListIndices,
    Question,
    batch_questions,
    masks_are_not_read,
    padded_encoders,
    plain_batch_norms,
    to_the_same_device,
)
from autopar.capture.tracing.data.checks import Comparisons, checks_pass
from autopar.capture.tracing.data.concrete_values import ConcreteValues
from autopar.capture.tracing.data.mask_losses import CtcLosses, MaskLosses
from autopar.capture.tracing.data.plain_types import plain_types
from autopar.capture.tracing.decomposition.program import decomposed
from autopar.capture.tracing.derivatives import derivatives_inside
from autopar.capture.tracing.equal_layers import of_equal_code, outline
from autopar.capture.tracing.experts import experts_as_operator
from autopar.capture.tracing.explain_error import explain, is_data_dependent
from autopar.capture.tracing.fake_copy import device_of, fake_tensors, refuse_uninitialized
from autopar.capture.tracing.flex import flex_as_operations
from autopar.capture.tracing.guards import Refusals, custom_functions, mark_no_grad, number_lines, refuse_complex, refuse_hooks
from autopar.capture.tracing.layer_span import join_layers
from autopar.capture.tracing.loss_only import LossOnly, ResultForm, check_loss_function
from autopar.errors import CaptureError
from autopar.ir.interface import Interface
from autopar.ops.opaque import opaque_modules
from autopar.runtime.device.autocast import under_autocast
from autopar.runtime.step.layouts import empty_of, layout_of


@dataclass(frozen=True, slots=True)
class Traced:
    """The exported program of the model (of `LossOnly` around it), with the names of its tensor inputs."""

    program: ExportedProgram
    input_names: tuple[str, ...]
    batch: int
    symbolic: bool
    ties: Mapping[str, str]
    """The first name of the same tensor, by each name of a parameter or buffer."""
    outputs: tuple[str, ...] = ()
    """The outputs that the program returns after the loss, as it would be asked for (``logits:full``)."""
    interface: Interface = Interface()
    differentiable: frozenset[str] = frozenset()
    """The inputs that gradients flow into."""
    fixed_at: str = ""
    """The line that makes a number of the batch, where it is not symbolic."""
    checks: tuple[str, ...] = ()
    """The lines of checks of data that are left out."""
    notes: tuple[str, ...] = ()
    """Lines for the plan."""
    derivatives: tuple[str, ...] = ()
    """The lines that take derivatives in the forward."""
    questions: tuple[Question, ...] = ()
    """The questions of the forward about sizes that are symbols."""
    lengths: Mapping[Any, int] = field(default_factory=dict)
    """Values of the symbols that are no batch (see `symbolic_lengths`)."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: CaptureOptions | None = None,
    open_dims: Mapping[str, tuple[int, ...]] | None = None,
    *,
    outlined: bool = True,
    fixed_batch: bool = False,
) -> Traced:
    """Exports the model with a symbolic batch; where the model specialises it, or with `fixed_batch`, with the batch size of the
    example. `open_dims` are further dimensions of inputs, by name, that stay symbolic where the model allows it.

    With `outlined` only one of equal layers is traced (see `equal_layers`); where that fails, all are.
    """
    options = options or CaptureOptions()
    refuse_hooks(model)
    refuse_uninitialized(model)
    refuse_complex(model)
    check_loss_function(options.loss_fn)
    bound = bind_inputs(model, args, kwargs, loss_fn=options.loss_fn, batch_dim=options.batch_dim)
    tensors, batch = bound.tensors, batch_of(bound.tensors)
    dtype = getattr(torch, options.compute_dtype) if options.compute_dtype else None
    ways = ((True, True), (True, False), (False, False)) if outlined else ((True, False), (False, False))
    attempts: tuple[tuple[bool, bool], ...] = ways[-1:] if fixed_batch else ways
    fixed_at = ""
    for symbolic, short in attempts:
        attempt = _Attempt(model, bound, dtype, options, open_dims or {}, symbolic, short)
        try:
            program = attempt.export()
            if program is None or attempt.clone is None:
                continue
            form, paths, left_out = attempt.forms[-1]
            for text in dict.fromkeys(attempt.warnings):
                warnings.warn(text, stacklevel=2)
            refuse_shared_buffers(model, program)
            refuse_gradients(program, attempt.clone.state)
            interface = replace(bound.interface, returns=form, left_out=left_out)
            return Traced(
                program=program,
                input_names=tuple(tensors),
                batch=batch,
                symbolic=symbolic,
                fixed_at="" if symbolic else fixed_at,
                ties=tied_names(model),
                outputs=paths,
                interface=interface,
                checks=tuple(dict.fromkeys(attempt.checks)),
                notes=tuple(dict.fromkeys(attempt.notes)),
                derivatives=tuple(dict.fromkeys(attempt.derivatives)),
                questions=tuple(dict.fromkeys(attempt.questions)),
                differentiable=frozenset(name for name, tensor in tensors.items() if tensor.requires_grad),
            )
        except CaptureError:
            raise
        except Exception as error:
            fixed_at = fixed_at or next((line for line in attempt.lines if ".py:" in line), "")
            if short or (symbolic and (attempt.values.more_at_fixed_sizes or not is_data_dependent(error))):
                continue
            raise explain(error, attempt.clone.module if attempt.clone is not None else model, attempt.derivatives) from None
    raise AssertionError


@dataclass(slots=True)
class _Attempt:
    """One way to export: with a symbolic batch or not, with equal layers outlined (`short`) or not. `forms`: of
    each run of the forward; `lines`: see `number_lines`, `checks`: `checks_pass`, `notes`: `padded_encoders`, `derivatives`:
    `derivatives_inside`."""

    model: nn.Module
    bound: BoundInputs
    dtype: torch.dtype | None
    options: CaptureOptions
    open_dims: Mapping[str, tuple[int, ...]]
    symbolic: bool
    short: bool
    forms: list[ResultForm] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    derivatives: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    values: ConcreteValues = field(default_factory=ConcreteValues)
    clone: LossOnly | None = None

    def export(self) -> ExportedProgram | None:
        """The program of a copy; None where no layers are equal."""
        with ExitStack() as stack:
            fake_copy = stack.enter_context(fake_tensors())
            copied = fake_copy(self.model, self.dtype)
            self.clone = clone = LossOnly(
                copied, self.bound, self.dtype, self.options, self.forms.append, self.warnings.extend
            )  # fmt: skip
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for context in (
                quiet_logs(), custom_functions(self.options.allowed_functions, self.short), flex_as_operations(),
                masks_are_not_read(), to_the_same_device(), plain_batch_norms(), plain_types(clone.module),
            ):  # fmt: skip
                stack.enter_context(context)
            self.lines = stack.enter_context(number_lines())
            self.checks = stack.enter_context(checks_pass())
            self.notes = stack.enter_context(padded_encoders())
            self.derivatives = stack.enter_context(derivatives_inside())
            self.questions = stack.enter_context(batch_questions())
            stack.enter_context(opaque_modules(self.model, clone.module, of_equal_code))
            stack.enter_context(experts_as_operator(clone.module))
            if self.short:
                clone.layers = stack.enter_context(outline(clone.module))
                if not clone.layers:
                    return None
            device = device_of(self.model)
            stack.enter_context(under_autocast(device.type, self.options.autocast))
            with ExitStack() as modes:  # every call of torch passes them, so what torch traces again does without
                refusals, comparisons = Refusals(self.short), Comparisons(self.checks)
                for mode in (ListIndices(), refusals, self.values, CtcLosses(), MaskLosses(), comparisons):
                    modes.enter_context(mode)
                program = export_copy(clone, self.bound, self.symbolic, self.open_dims, device)
            return decomposed(program, device, self.options.batch_norm == "local")


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def export_copy(
    clone: LossOnly,
    bound: BoundInputs,
    symbolic: bool,
    open_dims: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> ExportedProgram:
    """The program of operations that autograd sees. A batch of 1 is traced as 2, since torch specialises 0 and 1."""
    tensors, batch = bound.tensors, batch_of(bound.tensors)
    batched = {name: bool(tensor.dim()) and tensor.shape[0] == batch for name, tensor in tensors.items()}
    size = max(batch, 2) if symbolic else batch
    example = {
        name: empty_of(
            (size, *tensor.shape[1:]) if batched[name] else tensor.shape,
            layout_of(tensor) if bound.keeps_layout else (), dtype=tensor.dtype, device=device,
        ).requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }
    free = {
        name: {**({0: Dim.DYNAMIC} if batched[name] and symbolic else {}), **dict.fromkeys(open_dims.get(name, ()), Dim.AUTO)}
        for name in example
    }
    shapes = ({name: dims or None for name, dims in free.items()},) if any(free.values()) else None
    program: ExportedProgram = export(clone, (example,), dynamic_shapes=shapes, strict=False)
    merge_buffers(program, tied_names(clone))
    mark_no_grad(program)
    unroll_loops(program)
    join_layers(program)
    return program


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Export logs and prints what it is about to raise; the CaptureError says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
