"""The state dict of an optimizer over a parallel model as the plain model's optimizer has it (full tensors, numbered as there),
and back into an optimizer over a parallel model of any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..compat.dtensor import placed_like, replicated
from ..compat.hooks import replaced
from ..errors import StateError
from .gradient import place_of
from .materialize import State


class _Tensor(NamedTuple):
    """A sharded tensor of the state, for stages that have not its parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Described(NamedTuple):
    """The optimizer of one stage: names by group, options of the groups, state by name (`_Tensor` for what is sharded), and
    whether those are all of the stage's parameters."""

    groups: list[list[str]]
    options: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    covers_all: bool


def full_optimizer_state(state: State, optimizer: Optimizer, order: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of the plain model's optimizer; `order` are the names of the plain model's parameters. An optimizer
    of all parameters in one group gets all of them, any other one those that it has. All ranks call it."""
    own_groups = names_by_group(state.parameters, optimizer)
    by_name = _by_name(state, optimizer)
    described = _Described(
        own_groups,
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        {name: {key: _described(name, value) for key, value in values.items()} for name, values in by_name.items()},
        {name for group in own_groups for name in group} >= state.parameters.keys(),
    )
    stages = state.on_all_stages(described)
    every = [sorted(names, key=order.index) for names in joined_groups([each.groups for each in stages])]
    if len(every) == 1 and all(each.covers_all for each in stages):
        every = [list(order)]
    numbers = {name: number for number, name in enumerate(name for group in every for name in group)}
    entries: dict[int, dict[str, Any]] = {}
    for name in order:
        holder = next((stage for stage, each in enumerate(stages) if each.state.get(name)), None)
        if holder is not None:
            entries[numbers[name]] = {
                key: _full(state, name, value, holder, by_name.get(name, {}).get(key))
                for key, value in stages[holder].state[name].items()
            }
    groups = [
        options | {"params": [numbers[name] for name in group]} for options, group in zip(stages[0].options, every, strict=True)
    ]
    return {"state": entries, "param_groups": groups}


def load_full_optimizer_state(state: State, optimizer: Optimizer, saved: Mapping[str, Any], order: Sequence[str]) -> None:
    """The inverse, in place: of what `full_optimizer_state` gave under any plan, or of the plain model's optimizer with the same
    groups. Every rank has `saved`."""
    own_groups = names_by_group(state.parameters, optimizer)
    groups = saved["param_groups"]
    if len(groups) != len(own_groups):
        raise StateError(f"the saved optimizer has {len(groups)} groups, this one has {len(own_groups)}: give it the same groups")
    numbers: dict[str, int] = {}
    for index, (group, names) in enumerate(zip(groups, joined_groups(state.on_all_stages(own_groups)), strict=True)):
        whole = len(groups) == 1 and len(group["params"]) == len(order)
        names = list(order) if whole else sorted(names, key=order.index)
        if len(names) != len(group["params"]):
            raise StateError(
                f"group {index} of the saved optimizer has {len(group['params'])} parameters, this one has {len(names)}: "
                "give it the same groups"
            )
        numbers |= dict(zip(names, group["params"], strict=True))
    members = {name for group in own_groups for name in group}
    optimizer.state.clear()
    for name, parameter in state.parameters.items():
        if name in members and (values := saved["state"].get(numbers.get(name))):
            optimizer.state[parameter] = {key: _sharded(state, name, parameter, value) for key, value in values.items()}
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update({key: value for key, value in group.items() if key != "params"})


_LOAD_PLAIN = (
    "was given the state of a plain model's optimizer: load it with parallel.load_full_optimizer_state(optimizer, state)"
)


def refuse_plain_states() -> AbstractContextManager[None]:
    """Refuse the state of a plain model's optimizer on every stage of a pipeline: each has other parameters, or as many by
    chance, and torch says it on some of them."""
    usual = Optimizer.load_state_dict

    @wraps(usual)
    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        own = [group["params"] for group in self.param_groups]
        if any(place_of(parameter)[0] is not None for group in own for parameter in group):
            saved = [group["params"] for group in state_dict["param_groups"]]
            pairs = [pair for each in zip(own, saved, strict=False) for pair in zip(*each, strict=False)]
            if list(map(len, own)) != list(map(len, saved)) or any(
                _has_full(parameter, state_dict["state"].get(number, {})) for parameter, number in pairs
            ):
                raise StateError(f"this {type(self).__name__} {_LOAD_PLAIN}")
        usual(self, state_dict)

    return replaced(Optimizer, "load_state_dict", load_state_dict)


def _has_full(parameter: torch.Tensor, values: Mapping[str, Any]) -> bool:
    """Return whether the state of a sharded parameter has ordinary tensors of its shape."""
    tensors = [each for each in values.values() if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)]
    return isinstance(parameter, DTensor) and parameter.dim() > 0 and any(each.shape == parameter.shape for each in tensors)


def refuse_full_states(state: State, optimizer: Optimizer, *_: Any) -> None:
    """Refuse the step of an optimizer of `state` that was given full tensors."""
    parameter = next((p for p in optimizer.state if isinstance(p, DTensor) and p.dim()), None)
    if parameter is None or not _has_full(parameter, optimizer.state[parameter]):
        return
    if id(parameter) in {id(each) for each in state.parameters.values()}:
        raise StateError(f"this {type(optimizer).__name__} {_LOAD_PLAIN}")


def names_by_group(parameters: Mapping[str, torch.Tensor], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of this rank's parameters in each group. StateError where the optimizer has one of another model. The one
    without elements of a stage without parameters has no name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in names and parameter.numel() for parameter in group["params"]):
            raise StateError(
                "the optimizer has a parameter that is not of this model: make it from the parallel model's parameters()"
            )
        groups.append([names[id(parameter)] for parameter in group["params"] if id(parameter) in names])
    return groups


def joined_groups(stages: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return the names in each group of the optimizers of all stages, once each. StateError where their numbers differ."""
    if len({len(each) for each in stages}) > 1:
        raise StateError("the optimizers of the stages have different numbers of groups: give all of them the same groups")
    return [list(dict.fromkeys(name for names in same for name in names)) for same in zip(*stages, strict=True)]


def _by_name(state: State, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    states = {name: optimizer.state.get(parameter) for name, parameter in state.parameters.items()}
    return {name: values for name, values in states.items() if values}


def _described(name: str, value: Any) -> Any:
    if isinstance(value, DTensor):
        return _Tensor(tuple(value.shape), value.dtype)
    if isinstance(value, (list, tuple, dict)):
        raise StateError(
            f"the optimizer's state of {name} is no tensor or number (a history?), and cannot be made full: save "
            "parallel.full_state() only"
        )
    return value.clone() if isinstance(value, torch.Tensor) else value


def _full(state: State, name: str, value: Any, holder: int, own: Any) -> Any:
    """The full tensor on all ranks."""
    if not isinstance(value, _Tensor):
        return value.clone() if isinstance(value, torch.Tensor) else value
    pp = state.mesh.pp
    if pp.coordinate == holder:
        same = value.shape == tuple(state.parameters[name].shape)
        if not same and name in state.expert_orders:
            raise StateError(f"the optimizer's state of {name} is not shaped like it: call parallel.restore_experts() first")
        full = state.full(name, own) if same else own.full_tensor().contiguous()
    else:
        full = torch.empty(value.shape, dtype=value.dtype, device=state.mesh.device)
    if pp.size > 1:
        dist.broadcast(full, state.mesh.rank_in_stage(holder), state.mesh.group(pp.name))
    return full


def _sharded(state: State, name: str, parameter: nn.Parameter, value: Any) -> Any:
    """A full tensor of the state as a DTensor that is placed like the parameter; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if not value.dim():
        return value.clone()
    assert isinstance(parameter, DTensor)
    if value.shape != parameter.shape:  # the means of rows or columns
        return replicated(value.clone(), parameter.device_mesh)
    local = state.local_part(name, value).to(state.mesh.device, copy=True, memory_format=torch.contiguous_format)
    return placed_like(local, parameter)
