"""The state dict of an optimizer over a parallel model as the plain model's optimizer has it (full tensors, numbered as there),
and back into an optimizer over a parallel model of any plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..compat.dtensor import local_of, placed_like, replicated, with_local
from ..errors import StateError
from ..state.model_state import State
from ..state.stage_tensors import OnAnotherStage, held_by, holders_of, on_another_stage

Parameters = Mapping[str, nn.Parameter]
"""All parameters of the model by name, those of other stages of a pipeline too."""


def names_by_group(parameters: Mapping[str, torch.Tensor], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group. StateError where the optimizer has one of another model."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    if not all(map(all, groups)):
        raise StateError(
            "the optimizer has a parameter that is not of this model: make it from the parallel model's parameters()"
        )
    return groups


def full_optimizer_state(state: State, optimizer: Optimizer, parameters: Parameters) -> dict[str, Any]:
    """Return the state dict of the plain model's optimizer that the same script makes. All ranks call it."""
    groups = names_by_group(parameters, optimizer)
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    entries = {
        numbers[name]: {key: _full(state, name, value) for key, value in values.items()}
        for name, parameter in parameters.items()
        if name in numbers and (values := optimizer.state.get(parameter))
    }
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbered = [own | {"params": [numbers[name] for name in names]} for own, names in zip(options, groups, strict=True)]
    return {"state": entries, "param_groups": numbered}


def load_full_optimizer_state(state: State, optimizer: Optimizer, saved: Mapping[str, Any], parameters: Parameters) -> None:
    """The inverse, in place: of what `full_optimizer_state` gave under any plan, or of the plain model's optimizer with the same
    groups. Every rank has `saved`."""
    numbers = _saved_numbers(saved, names_by_group(parameters, optimizer), parameters)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if values := saved["state"].get(numbers.get(name)):
            _check_fits(name, parameter, values)
            optimizer.state[parameter] = {key: _sharded(state, name, parameter, value) for key, value in values.items()}
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        own.update({key: value for key, value in group.items() if key not in ("params", "param_names")})


def _saved_numbers(saved: Mapping[str, Any], own: list[list[str]], parameters: Parameters) -> dict[str, int]:
    """Return the number of each parameter in the saved state: by name where it has names, else by its position in the group."""
    groups = saved["param_groups"]
    if len(groups) != len(own):
        raise StateError(f"the saved optimizer has {len(groups)} groups, this one has {len(own)}: give it the same groups")
    named = all(parameters.keys() >= set(group.get("param_names", ("",))) for group in groups)
    numbers: dict[str, int] = {}
    for index, (group, names) in enumerate(zip(groups, own, strict=True)):
        places = group["params"]
        theirs = list(group["param_names"]) if named else names
        if odd := sorted(set(theirs).symmetric_difference(names)):
            raise StateError(f"group {index} of the saved optimizer has other parameters ({odd[0]}): give it the same groups")
        if len(theirs) != len(places):
            raise StateError(
                f"group {index} of the saved optimizer has {len(places)} parameters, this one has {len(names)}: give it the same "
                "groups"
            )
        numbers |= dict(zip(theirs, places, strict=True))
    return numbers


def _check_fits(name: str, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
    """Raise a StateError where no tensor of the state has the sizes of the parameter (or some of them: means of rows)."""
    tensors = [each for each in values.values() if isinstance(each, torch.Tensor) and each.dim()]
    if tensors and not any(set(each.shape) <= {1, *parameter.shape} for each in tensors):
        raise StateError(
            f"the saved state of {name} has shape {tuple(tensors[0].shape)} and the parameter {tuple(parameter.shape)}: make the "
            "optimizer as the saved one was made, with the parameters in the same order"
        )


_LOAD_PLAIN = (
    "was given the state of a plain model's optimizer: load it with parallel.load_full_optimizer_state(optimizer, state)"
)


def _has_full(parameter: torch.Tensor, values: Mapping[str, Any]) -> bool:
    """Return whether the state of a sharded parameter has ordinary tensors of its shape."""
    tensors = [each for each in values.values() if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)]
    return isinstance(parameter, DTensor) and parameter.dim() > 0 and any(each.shape == parameter.shape for each in tensors)


def refuse_full_states(state: State, optimizer: Optimizer, *_: Any) -> None:
    """Refuse the step of an optimizer of `state` that was given full tensors."""
    parameter = next((p for p in optimizer.state if isinstance(p, DTensor) and p.dim()), None)
    if parameter is None or not _has_full(parameter, optimizer.state[parameter]):
        return
    if id(parameter) in {id(each) for each in state.every_parameter.values()}:
        raise StateError(f"this {type(optimizer).__name__} {_LOAD_PLAIN}")


def _full(state: State, name: str, value: Any) -> Any:
    """The full tensor on all ranks."""
    if isinstance(value, (list, tuple, dict)):
        raise StateError(
            f"the optimizer's state of {name} is no tensor or number (a history?), and cannot be made full: save "
            "parallel.full_state() only"
        )
    if not isinstance(value, DTensor):
        return value.clone() if isinstance(value, torch.Tensor) else value
    spec = state.index.specs.get(name)
    if spec is None or value.shape != tuple(spec.shape):
        if name in state.expert_orders:
            raise StateError(f"the optimizer's state of {name} is not shaped like it: call parallel.restore_experts() first")
        return value.full_tensor().contiguous()
    return state.broadcast_full(name, value, value.dtype)


def _sharded(state: State, name: str, parameter: nn.Parameter, value: Any) -> Any:
    """A full tensor of the state as a DTensor that is placed like the parameter; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if not value.dim():
        return value.clone()
    assert isinstance(parameter, DTensor)
    holders = holders_of(parameter)
    if isinstance(parameter, OnAnotherStage) and holders is not None:
        return on_another_stage(value.shape, value.dtype, holders)
    if name not in state.parameters:  # which no program reads: where the plain model has it
        own = value.to(local_of(parameter).device, copy=True)
        return with_local(DTensor, own, parameter.device_mesh, own.shape, own.stride())
    if value.shape != parameter.shape:  # the means of rows or columns
        return held_by(replicated(value.clone(), parameter.device_mesh), holders)
    local = state.local_part(name, value).to(state.mesh.device, copy=True, memory_format=torch.contiguous_format)
    return held_by(placed_like(local, parameter), holders)
