"""The one training loop of the tests, for a model on one process and for a parallel model on ranks: forward, backward, step.

``train(model, [batch] * 3)`` gives losses, the first gradients and the state at the end; hooks see each step from inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.ir.graph import Graph

STEPS = 3
RATE = 1e-3
Tensors = dict[str, Tensor]
Batch = Mapping[str, Any]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional arguments and keywords of a model."""


class Training(NamedTuple):
    """What a training leaves: the loss of every call, the full gradients of the first step, and the full state at the end."""

    losses: list[float]
    gradients: Tensors
    state: Tensors


def adamw(rate: float = RATE) -> Callable[[nn.Module], Optimizer]:
    """A factory of AdamW over what is trainable."""
    return lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)


def sgd(rate: float = 0.1) -> Callable[[nn.Module], Optimizer]:
    """A factory of SGD over what is trainable."""
    return lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


def train(
    model: nn.Module, batches: Iterable[Batch | Call], optimizer: Optimizer | Callable[[nn.Module], Optimizer] | None = None, *,
    loss_factor: float = 1.0, accumulate: int = 1, after_backward: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> Training:  # fmt: skip
    """One forward and backward for each batch, one step for each `accumulate` of them; gradients are None before and after.

    `optimizer`: one that exists, or a factory (AdamW unless given). Hooks get the number of the batch.
    """
    made = optimizer if isinstance(optimizer, Optimizer) else (optimizer or adamw())(model)
    losses: list[float] = []
    first: Tensors | None = None
    made.zero_grad()
    for index, batch in enumerate(batches):
        args, keywords = batch if isinstance(batch, tuple) else ((), batch)
        loss = loss_of(model(*args, **keywords))
        (loss if loss_factor == accumulate == 1 else loss * loss_factor / accumulate).backward()
        losses.append(loss.item())
        if (index + 1) % accumulate:
            continue
        if first is None:
            first = full_gradients(model)
        if after_backward is not None:
            after_backward(index)
        made.step()
        if after_step is not None:
            after_step(index)
        made.zero_grad()
    return Training(losses, first or {}, full_state(model))


def loss_of(output: Any) -> Tensor:
    """The scalar that a model returned."""
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss  # type: ignore[no-any-return]


def full_gradients(model: nn.Module) -> Tensors:
    """Copies of the whole gradients by name, of one process or of a parallel model."""
    if hasattr(model, "full_gradients"):
        return model.full_gradients()  # type: ignore[no-any-return,operator]
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def full_state(model: nn.Module) -> Tensors:
    """Copies of the whole parameters and buffers by name, of one process or of a parallel model."""
    if hasattr(model, "full_state"):
        return model.full_state()  # type: ignore[no-any-return,operator]
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def graph_state(graph: Graph, model: nn.Module) -> Tensors:
    """Copies of the parameters and buffers that the graph of a model reads."""
    needed = graph.parameters()
    return {name: tensor for name, tensor in full_state(model).items() if name in needed}


def clip_gradients(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips, and gives the norm before it."""
    if hasattr(model, "clip_grad_norm_"):
        return model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[no-any-return,operator]
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def parallel_model(text: str, state: Any, **options: Any) -> Any:
    """On a rank: the program of this text as a user has it. `options` are those of `Parallel`. Every step compares the copies of
    parameters on all ranks."""
    from autopar.program.load import load_program
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    program: Any = load_program(text).Program
    return Parallel(program(MeshHandle(program.mesh_axes)), state, **{"check_every": 1} | options)
