"""What torch's own functions do with the DTensors of a parallel model: right where DTensor alone is not, or refused in a line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ..comm.heartbeat import glancing
from ..compat import (
    before_full_states,
    collective_operations,
    data_by_values,
    further_operations,
    gradients_by,
    graph_of,
    operations_of_shards,
    whole_items,
)
from ..errors import RuntimeProblem, StateError
from ..state.gradient import place_of, stand_in
from ..state.materialize import State
from .mixed_operations import mix_whole_tensors
from .random_draws import draw_whole_tensors, stages_in_use


def teach_torch() -> None:
    """Once in a process: random numbers, reductions and writes that DTensor has not, collectives by hand, full states of
    pipelines, and optimizers of parameters that a stage has none of."""
    whole_items(glancing)
    data_by_values()
    further_operations()
    draw_whole_tensors()
    mix_whole_tensors()
    operations_of_shards().update(dict.fromkeys(collective_operations(), _refuse_collective))
    before_full_states(_refuse_one_stage)
    _allow_empty_optimizers()
    gradients_by(_gradients)


def mark_result(result: torch.Tensor, state: State) -> None:
    """Says whose parameters a result was computed from, for `torch.autograd.grad`."""
    if result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata
        metadata["autopar"] = weakref.ref(state)


def _gradients(
    engine: Callable[..., Any], results: Any, gradients: Any, retain: bool, create: bool, inputs: Any, allow_unused: bool
) -> Any:
    """``torch.autograd.grad`` of a result of a parallel model by its parameters: those of a whole backward, which gathers and
    reduces. All ``.grad`` stay as they are. NotImplemented for all else."""
    if not any(place_of(each)[1] for each in inputs):
        return NotImplemented
    nodes = list(graph_of(results))
    marks = (node.metadata["autopar"]() for node in nodes if "autopar" in node.metadata)
    states = {id(state): state for state in marks if state is not None}
    if not states:
        return NotImplemented
    if create or any(each.grad_fn is not None for each in inputs):
        raise RuntimeProblem(
            "torch.autograd.grad of a parallel model gives gradients by its parameters and by leaves, without a graph of their "
            "own: leave create_graph out, and ask for others in another call"
        )
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    own = (p for state in states.values() for p in state.parameters.values())
    every = {id(each): each for each in (*leaves, *inputs, *own)}
    before = [(each, each.grad) for each in every.values()]
    try:
        for each in every.values():
            each.grad = None
        engine(results, gradients, retain, False, (), allow_unreachable=True, accumulate_grad=True)
        found = tuple(each.grad for each in inputs)
    finally:
        for each, gradient in before:
            each.grad = gradient
    if not allow_unused and any(each is None for each in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the "
            "desired behavior."
        )
    return found


def _refuse_collective(op: Any, args: Any, kwargs: Any) -> Any:
    word = str(op).removeprefix("c10d.").partition(".")[0].strip("_")
    raise StateError(
        f"{word} of a DTensor, which has one value on all ranks: leave it out, with a division by the number of ranks (gradients "
        "are reduced in the backward), or pass x.full_tensor()"
    )


def _refuse_one_stage(parameters: Iterable[torch.Tensor]) -> None:
    if any(place_of(each)[0] is not None for each in parameters):
        raise StateError(
            "a full state dict of torch.distributed.checkpoint has the parameters of one stage of a pipeline only: call "
            "parallel.full_state() and parallel.full_optimizer_state(optimizer) on all ranks, or leave full_state_dict out"
        )


def _allow_empty_optimizers() -> None:
    """An optimizer of some of the parameters, of which a stage of a pipeline has none, gets one without elements there."""
    original: Any = Optimizer.__init__
    if getattr(original, "autopar", False):
        return

    def init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, (torch.Tensor, dict)):
            params = list(params)
            stages = stages_in_use()
            if not params and stages:
                params = [stand_in(stages[0].mesh.device, stages[0])]
        original(self, params, defaults)

    init.autopar = True  # type: ignore[attr-defined]
    Optimizer.__init__ = init  # type: ignore[method-assign]
