"""A step in micro-batches (gradient accumulation): all forwards and backwards run inside one call, whose loss is one autograd
node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.conversions import shard_of
from ..compat.autograd import apply, keeps_graph
from ..compat.dtensor import local_of
from ..device.mesh import DATA_AXIS
from ..errors import BatchError, RuntimeProblem
from ..module import Program
from ..state.fsdp import prepare_backward
from ..state.loss_scale import LossScale
from ..state.model_state import State
from .outputs import join_micro_batches, reduce_parts

Batch = dict[str, torch.Tensor]
StepResult = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""A loss, and the outputs beside it."""


class ComputedStep(NamedTuple):
    """A loss without a graph, the gradients of the parameters that it reached, and the outputs."""

    loss: torch.Tensor
    gradients: dict[nn.Parameter, torch.Tensor]
    outputs: Sequence[torch.Tensor]


def run_micro_batches(program: Program, state: State, inputs: Batch) -> StepResult:
    """The loss of this rank's batch, computed in ``program.micro_batches`` parts, and the outputs. Gradients are computed now,
    and the loss's backward hands them out; without gradients only forwards run."""
    if torch.is_grad_enabled():
        state.loss_scale.begin(program.loss_dtype)
        loss, gradients, outputs = compute_step(program, state, inputs)
        return deliver_gradients(state, loss, gradients), outputs
    parts = split_micro_batches(program, inputs)
    totals = batch_totals(program, parts)
    losses: list[torch.Tensor] = []
    others: list[Sequence[torch.Tensor]] = []
    for part in parts:
        each, outputs_of_part = split_result(program(**part, **totals))
        losses.append(each)
        others.append(outputs_of_part)
    return reduce(torch.add, losses), join_micro_batches(program, others)


def compute_step(program: Program, state: State, inputs: Batch) -> ComputedStep:
    """Return what the forwards and backwards of this rank's batch compute."""
    parts = split_micro_batches(program, inputs)
    totals = batch_totals(program, parts)
    others: list[Sequence[torch.Tensor]] = []
    loss, gradients = compute_gradients(state, lambda: _train(program, state, parts, totals, others))
    return ComputedStep(loss, gradients, join_micro_batches(program, others))


def split_result(result: torch.Tensor | tuple[torch.Tensor, ...]) -> StepResult:
    """Divide a program's result into (loss, outputs)."""
    return (result, ()) if isinstance(result, torch.Tensor) else (result[0], result[1:])


def _train(
    program: Program,
    state: State,
    parts: Sequence[Batch],
    totals: Mapping[str, torch.Tensor],
    others: list[Sequence[torch.Tensor]],
) -> torch.Tensor:
    losses = []
    try:
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            prepare_backward(program.state_program, last)
            state.buckets.accumulating = not last
            loss, outputs_of_part = split_result(program(**part, **totals))
            others.append(outputs_of_part)
            if loss.requires_grad:
                torch.autograd.backward(loss, state.loss_scale.gradient(loss))
            losses.append(loss.detach())
        state.buckets.finish()
    finally:  # where a micro-batch raised, a program without micro-batches may be next
        prepare_backward(program.state_program, True)
        state.buckets.accumulating = False
    return reduce(torch.add, losses)


def compute_gradients(state: State, train: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor]]:
    """Return the loss that `train` returns, and the gradients that it leaves with the parameters, which keep those of before."""
    parameters = [parameter for parameter in state.parameters.values() if parameter.requires_grad]
    saved = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = train()
        computed = [(parameter, parameter.grad) for parameter in parameters]
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient
    return loss, {parameter: gradient for parameter, gradient in computed if gradient is not None}


def deliver_gradients(
    state: State,
    loss: torch.Tensor,
    gradients: Mapping[nn.Parameter, torch.Tensor],
    reached: dict[Any, list[str]] | None = None,
) -> torch.Tensor:
    """Return the loss, whose backward hands out the gradients of the parameters that it reached, those of other stages of a
    pipeline too; one that reached none has no graph, but on a pipeline. `reached`: see `State.gradients_elsewhere`."""
    every = {**gradients, **state.gradients_elsewhere(gradients.keys(), reached)}
    if not every:  # the first window of two weight versions has none yet
        return loss if state.pipeline is None else loss.requires_grad_()
    parameters = [each for each in state.every_parameter.values() if each in every]  # in which all ranks have them
    result: torch.Tensor = apply(_Deliver, loss, [every[each] for each in parameters], state.loss_scale, *parameters)
    return result


def split_micro_batches(program: Program, inputs: Batch) -> list[Batch]:
    """This rank's batch in equal parts. Inputs are split where the data axis shards them; the others are whole in every part."""
    count = program.micro_batches
    parts: list[Batch] = [{} for _ in range(count)]
    for name, tensor in inputs.items():
        shard = shard_of(program.input_placements[name].get(DATA_AXIS, "R"))
        if shard is None:
            slices: Sequence[torch.Tensor] = [tensor] * count
        else:
            dim, _ = shard
            if tensor.shape[dim] % count:
                ranks = program.mesh.dp.size
                raise BatchError(
                    f"the {tensor.shape[dim] * ranks} examples of input {name} do not divide over {ranks} data-parallel ranks "
                    f"and {count} micro-batches; pass a batch whose size is a multiple of {ranks * count}"
                )
            slices = tensor.chunk(count, dim)
        for part, part_input in zip(parts, slices, strict=True):
            part[name] = part_input
    return parts


def batch_totals(program: Program, parts: Sequence[Batch]) -> Mapping[str, torch.Tensor]:
    """Return what the loss needs of the whole batch, computed from the inputs alone."""
    if not program.totals:
        return {}
    with torch.no_grad():
        each = [program.count(**part) for part in parts]
        stacked = {name: torch.stack([counted[name] for counted in each]) for name in program.totals}
        return {name: reduce_parts(stacked[name], op) for name, op in program.totals.items()}


class _Deliver(torch.autograd.Function):
    """The loss as a function of the parameters: the known gradients, times the gradient of the loss, are handed out; as copies
    where the graph is kept for another backward."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], scale: LossScale, *parameters: nn.Parameter
    ) -> torch.Tensor:
        ctx.gradients, ctx.scale, ctx.used = gradients, scale, scale.used
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeProblem(
                "a second backward through the loss of a step in micro-batches or of a CUDA graph, whose gradients were already "
                "handed out: run the one before with retain_graph=True, or call the model again"
            )
        gradients = ctx.gradients
        if keeps_graph():
            gradients = [gradient.clone() for gradient in gradients]
        else:
            ctx.gradients = None
        factor = ctx.scale.factor(grad, ctx.used)
        return None, None, None, *(_scaled(gradient, factor) for gradient in gradients)


def _scaled(gradient: Any, factor: torch.Tensor) -> torch.Tensor:
    """Multiply in place: the tensor becomes the parameter's gradient."""
    local_of(gradient).mul_(factor.to(gradient.dtype))
    result: torch.Tensor = gradient
    return result
