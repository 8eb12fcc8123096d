"""A step in several micro-batches: forward and backward of each inside one call, and the loss of all as one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .apply import apply
from .errors import BatchProblem, RuntimeProblem
from .mesh import DATA_AXIS
from .module import Program
from .outputs import joined
from .state import State
from .zero import next_backward

Batch = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""A loss, and outputs beside it."""


def run(program: Program, state: State, inputs: Batch) -> Result:
    """The loss of this rank's batch, taken in ``program.micro_batches`` parts, and the outputs. The loss's backward hands out the
    gradients, which are computed now; without gradients only forwards run."""
    parts = split(program, inputs)
    totals = reduced(program, parts)
    others: list[Sequence[torch.Tensor]] = []
    if torch.is_grad_enabled():
        loss = delivered(state, lambda: _train(program, state, parts, totals, others))
    else:
        losses = []
        for part in parts:
            each, beside = apart(program(**part, **totals))
            losses.append(each)
            others.append(beside)
        loss = total(losses)
    return loss, joined(program, others)


def apart(result: torch.Tensor | tuple[torch.Tensor, ...]) -> Result:
    """What a program returns: the loss, and behind it the outputs."""
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
            next_backward(program, last)
            state.buckets.hold = not last
            loss, beside = apart(program(**part, **totals))
            others.append(beside)
            if loss.requires_grad:
                torch.autograd.backward(loss)
            losses.append(loss.detach())
        state.buckets.finish()
    finally:
        state.buckets.hold = False
    return total(losses)


def delivered(state: State, train: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The loss that `train` returns, which leaves gradients with the parameters: they are taken from there, and the backward of
    the loss hands them out. A loss that reached no parameter has no graph."""
    parameters = [parameter for parameter in state.parameters.values() if parameter.requires_grad]
    aside = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = train()
        made = [(parameter, parameter.grad) for parameter in parameters]
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient
    reached = {parameter: gradient for parameter, gradient in made if gradient is not None}
    if not reached:
        return loss
    result: torch.Tensor = apply(_Deliver, loss, list(reached.values()), *reached)
    return result


def total(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, from the first on."""
    loss = losses[0]
    for other in losses[1:]:
        loss = loss + other
    return loss


def split(program: Program, inputs: Batch) -> list[Batch]:
    """This rank's batch in equal parts. Inputs are cut where the data axis cuts them, the others are whole in every part."""
    count = program.micro_batches
    parts: list[Batch] = [{} for _ in range(count)]
    for name, tensor in inputs.items():
        where = program.input_placements[name].get(DATA_AXIS, "R")
        if not where.startswith("S"):
            pieces: Sequence[torch.Tensor] = [tensor] * count
        else:
            dim = int(where[2:-1])
            if tensor.shape[dim] % count:
                ranks = program.mesh.dp.size
                raise BatchProblem(
                    f"the {tensor.shape[dim] * ranks} examples of input {name} do not divide over {ranks} data-parallel ranks "
                    f"and {count} micro-batches; pass a batch whose size is a multiple of {ranks * count}"
                )
            pieces = tensor.chunk(count, dim)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def reduced(program: Program, parts: Sequence[Batch]) -> Mapping[str, torch.Tensor]:
    """What the loss needs of the whole batch, from the inputs alone."""
    if not program.totals:
        return {}
    with torch.no_grad():
        each = [program.count(**part) for part in parts]
        stacked = {name: torch.stack([counted[name] for counted in each]) for name in program.totals}
        return {name: _reduce(stacked[name], op) for name, op in program.totals.items()}


def _reduce(stacked: torch.Tensor, op: str) -> torch.Tensor:
    if op == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


class _Deliver(torch.autograd.Function):
    """The loss over the parameters: the gradients are known, and are handed out times the gradient of the loss, once."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *parameters: nn.Parameter) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeProblem(
                "a second backward through the loss of a step in micro-batches, whose gradients are handed out: "
                "call the model again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(_scaled(gradient, grad) for gradient in gradients)


def _scaled(gradient: Any, factor: torch.Tensor) -> torch.Tensor:
    """In place: the tensor becomes the parameter's gradient."""
    gradient.to_local().mul_(factor.to(gradient.dtype))
    result: torch.Tensor = gradient
    return result
