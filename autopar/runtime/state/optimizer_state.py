"""The state dict of an optimizer over a parallel model as the plain model's optimizer has it: full tensors, numbered as there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import RuntimeProblem, StateProblem
from .materialize import State


def full_optimizer_state(state: State, optimizer: Optimizer, order: Sequence[str]) -> dict[str, Any]:
    """`order` are the names of the plain model's parameters. An optimizer with one group gets all of them, one with several
    groups those that it has. All ranks call it."""
    if state.mesh.pp.size > 1:
        raise RuntimeProblem(
            "the optimizer of a pipeline has the parameters of one stage: save it with torch.distributed.checkpoint and "
            "StateDictOptions(flatten_optimizer_state_dict=True)"
        )
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    groups = [[_name(names, parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    every = [sorted(group, key=order.index) for group in groups]
    if len(groups) == 1 and all(parameter.requires_grad for parameter in state.parameters.values()):
        every = [list(order)]
    numbers = {name: number for number, name in enumerate(name for group in every for name in group)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = {_name(names, parameter): optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state}
    found = {
        numbers[name]: {key: _full(state, name, value) for key, value in by_name[name].items()}
        for name in order
        if by_name.get(name)
    }
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "state": found,
        "param_groups": [
            each | {"params": [numbers[name] for name in group]} for each, group in zip(options, every, strict=True)
        ],
    }


def _name(names: dict[int, str], parameter: torch.Tensor) -> str:
    if id(parameter) not in names:
        raise StateProblem("the optimizer has a parameter that is not of this parallel model: make it from parallel.parameters()")
    return names[id(parameter)]


def _full(state: State, name: str, value: Any) -> Any:
    if isinstance(value, DTensor):
        if value.shape != state.parameters[name].shape:
            raise StateProblem(f"a state of {name} has not its shape: save the optimizer with torch.distributed.checkpoint")
        return state.full(name, value)
    return value.clone() if isinstance(value, torch.Tensor) else value
