"""The state dict of an optimizer over a parallel model as the plain model's optimizer has it: full tensors, numbered as there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import RuntimeProblem, StateProblem
from .layout import model_shard, zero_shard
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
    every = _groups(state, optimizer, order)
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


def load_full_optimizer_state(state: State, optimizer: Optimizer, order: Sequence[str], full: Mapping[str, Any]) -> None:
    """Gives the optimizer its shards of the state dict of the plain model's optimizer, or of `full_optimizer_state` under any
    plan. Every rank passes the full tensors; nothing is sent."""
    if state.mesh.pp.size > 1:
        raise RuntimeProblem(
            "the optimizer of a pipeline has the parameters of one stage: load it with torch.distributed.checkpoint and "
            "StateDictOptions(flatten_optimizer_state_dict=True)"
        )
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    every, theirs = _groups(state, optimizer, order), full["param_groups"]
    if [len(group) for group in every] != [len(group["params"]) for group in theirs]:
        found, wanted = ([len(group) for group in groups] for groups in ([group["params"] for group in theirs], every))
        raise StateProblem(
            f"the optimizer state is for parameter groups of {found} parameters, this optimizer has {wanted}: make it with the "
            "groups of the plain model's"
        )
    numbers = {
        name: number
        for mine, group in zip(every, theirs, strict=True)
        for name, number in zip(mine, group["params"], strict=True)
    }
    own = optimizer.state_dict()
    loaded: dict[int, dict[str, Any]] = {}
    for group, packed in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = _name(names, parameter)
            if numbers[name] in full["state"]:
                values = full["state"][numbers[name]]
                loaded[index] = {key: _shard(state, name, parameter, value) for key, value in values.items()}
    groups = [{**packed, **group, "params": packed["params"]} for packed, group in zip(own["param_groups"], theirs, strict=True)]
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def _groups(state: State, optimizer: Optimizer, order: Sequence[str]) -> list[list[str]]:
    """The names in each parameter group of the plain model's optimizer."""
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    groups = [[_name(names, parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    if len(groups) == 1 and all(parameter.requires_grad for parameter in state.parameters.values()):
        return [list(order)]
    return [sorted(group, key=order.index) for group in groups]


def _shard(state: State, name: str, parameter: torch.Tensor, value: Any) -> Any:
    """This rank's part of a full tensor of the parameter's shape, as a DTensor like it; others as they are."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, torch.Tensor) else value
    if value.shape != parameter.shape or not isinstance(parameter, DTensor):
        raise StateProblem(f"a state of {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
    local = model_shard(value.to(state.mesh.device), state.specs[name].placements, state.mesh)
    local = zero_shard(local, state.zero_dims[name], state.mesh).clone()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


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
