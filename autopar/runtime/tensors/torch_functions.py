"""Torch's own functions on the DTensors of a parallel model: right where DTensor alone is not, or refused in a line.

Terms of the parameters that a script adds to the loss (L2 and L1 penalties) are DTensors, so the sum is one, and so is its
gradient, which the program takes as an ordinary tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat.autograd import apply, graph_of, is_batched
from ..compat.dtensor import whole
from ..compat.hooks import shard_operations
from ..compat.torch_operations import collective_operations
from ..errors import RuntimeProblem, StateError
from ..state.gradient import name_of
from ..state.model_state import State
from ..state.stage_tensors import on_all_stages


def mark_result(result: torch.Tensor, state: State) -> None:
    """Say whose parameters a result was computed from, for `torch.autograd.grad`."""
    if result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata
        metadata["autopar"] = weakref.ref(state)


def parameter_gradients(
    engine: Callable[..., Any], results: Any, gradients: Any, retain: bool, create: bool, inputs: Any,
    allow_unused: bool, accumulate: bool,
) -> Any:  # fmt: skip
    """Return ``torch.autograd.grad`` of a result of a parallel model by its parameters: those of a whole backward, which gathers
    and reduces. All ``.grad`` stay as they are, but for those of ``backward(inputs=...)``. NotImplemented for all else.
    RuntimeProblem for a graph of these gradients, also without `inputs`, and for several backwards at once. `accumulate`: add to
    the ``.grad`` of these inputs."""
    if any(each is not None and is_batched(each) for each in gradients):
        if any("autopar" in node.metadata for node in graph_of(results)):
            raise RuntimeProblem(
                "a backward through a parallel model has one gradient at a time: leave is_grads_batched=True (vectorize=True) "
                "out, and call torch.autograd.grad for each"
            )
        return NotImplemented
    if inputs and not any(map(name_of, inputs)):
        return NotImplemented
    nodes = list(graph_of(results))
    marks = (node.metadata["autopar"]() for node in nodes if "autopar" in node.metadata)
    states = {id(state): state for state in marks if state is not None}
    if not states:
        return NotImplemented
    if create or any(each.grad_fn is not None for each in inputs):
        raise RuntimeProblem(
            "the gradients of a parallel model by its parameters, and by leaves beside them, have no graph of their own: leave "
            "create_graph out, and ask for others in another call"
        )
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    own = (p for state in states.values() for p in state.every_parameter.values())
    every = {id(each): each for each in (*leaves, *inputs, *own)}
    before = [(each, each.grad) for each in every.values()]
    try:
        for each in every.values():
            each.grad = None
        engine(results, gradients, retain, False, (), allow_unreachable=True, accumulate_grad=True)
        gradients_of_inputs = tuple(each.grad for each in inputs)
    finally:
        for each, gradient in before:
            each.grad = gradient
    if accumulate:
        for each, gradient in zip(inputs, gradients_of_inputs, strict=True):
            if gradient is not None:
                each.grad = gradient if each.grad is None else each.grad + gradient
        return ()
    if not allow_unused and any(each is None for each in gradients_of_inputs):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the "
            "desired behavior."
        )
    return gradients_of_inputs


def refuse_collectives() -> AbstractContextManager[None]:
    """Refuse collectives by hand (``dist.all_reduce(p.grad)``) of DTensors."""
    return shard_operations(dict.fromkeys(collective_operations(), _refuse_collective))


def _refuse_collective(op: Any, args: Any, kwargs: Any) -> Any:
    word = str(op).removeprefix("c10d.").partition(".")[0].strip("_")
    if word == "broadcast":  # of parameters, which ZeroRedundancyOptimizer sends after its step
        raise StateError(
            "broadcast of a DTensor, which has one value on all ranks: leave it out, or pass x.full_tensor(); in place of an "
            "optimizer that shards its state (ZeroRedundancyOptimizer) take the one inside of it (torch.optim.AdamW), whose "
            "state the plan shards"
        )
    raise StateError(
        f"{word} of a DTensor, which has one value on all ranks: leave it out, with a division by the number of ranks (gradients "
        "are reduced in the backward), or pass x.full_tensor()"
    )


def with_plain_gradient(loss: torch.Tensor) -> torch.Tensor:
    """Return `loss`, whose gradient may come as a DTensor."""
    return apply(_PlainGradient, loss)  # type: ignore[no-any-return]


class _PlainGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()  # autograd allows no ``loss /= steps`` on what a Function returns as a view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return whole(on_all_stages([grad])[0]).to_local() if isinstance(grad, DTensor) else grad


def explain_penalty(error: Exception) -> RuntimeProblem | None:
    """Return DTensor's error for a term of the parameters in a loss outside of the program, with its remedy."""
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    return RuntimeProblem(
        "a term of the parameters in a loss outside of the program (a penalty) is a DTensor, whose gradient ordinary tensors do "
        "not take: add term.full_tensor(), or compute it of p.full_tensor()"
    )
