"""The state dict of an optimizer over a parallel model as the plain model's optimizer has it (full tensors, numbered as there),
and back into an optimizer over a parallel model of any plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
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
from ..state.materialize import State
from ..state.stage_gradients import place_of
from .optimizer_groups import ParameterKind, joined_groups, names_by_group, ordered_groups, with_unused

Kinds = Mapping[str, ParameterKind]
"""Of the parameters of the plain model, in its order."""


class _Tensor(NamedTuple):
    """A sharded tensor of the state, for stages that have not its parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Described(NamedTuple):
    """The optimizer of one stage: names by group, options of the groups, the names that its script gave (``param_names``), state
    by name (`_Tensor` for what is sharded), and which parameters of the stage train."""

    groups: list[list[str]]
    options: list[dict[str, Any]]
    script_names: dict[str, str]
    state: dict[str, dict[str, Any]]
    trains: dict[str, bool]


def full_optimizer_state(state: State, optimizer: Optimizer, kinds: Kinds) -> dict[str, Any]:
    """Return the state dict of the plain model's optimizer that the same script makes. All ranks call it."""
    by_name = _by_name(state, optimizer)
    stages = state.on_all_stages(_describe(state, optimizer, by_name))
    every, unknown = _with_unused(state, ordered_groups([each.groups for each in stages], list(kinds)), kinds, stages)
    if unknown:
        warnings.warn(
            f"{unknown}, which no forward uses, is not in the state of the optimizer, since nothing says in which group a plain "
            "model's optimizer has it: for one that has it, call parallel.save and autopar.load_checkpoint, which go by names",
            stacklevel=4,
        )
    numbers = {name: number for number, name in enumerate(name for group in every for name in group)}
    entries: dict[int, dict[str, Any]] = {}
    for name in kinds:
        holder = next((stage for stage, each in enumerate(stages) if each.state.get(name)), None)
        if holder is not None:
            entries[numbers[name]] = {
                key: _full(state, name, value, holder, by_name.get(name, {}).get(key))
                for key, value in stages[holder].state[name].items()
            }
    script_names = {name: each for stage in stages for name, each in stage.script_names.items()}
    groups = []
    for options, group in zip(stages[0].options, every, strict=True):
        names = {"param_names": [script_names.get(name, name) for name in group]} if "param_names" in options else {}
        groups.append(options | names | {"params": [numbers[name] for name in group]})
    return {"state": entries, "param_groups": groups}


def _describe(state: State, optimizer: Optimizer, by_name: Mapping[str, Mapping[str, Any]]) -> _Described:
    groups = names_by_group(state.parameters, optimizer)
    script_names = [group.get("param_names", ()) for group in optimizer.param_groups]
    return _Described(
        groups,
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        {name: each for own, names in zip(groups, script_names, strict=True) for name, each in zip(own, names, strict=False)},
        {name: {key: _described(name, value) for key, value in values.items()} for name, values in by_name.items()},
        {name: parameter.requires_grad for name, parameter in state.parameters.items()},
    )


def _with_unused(
    state: State, groups: Sequence[Sequence[str]], kinds: Kinds, stages: Sequence[_Described]
) -> tuple[list[list[str]], str]:
    trains = {name: each for stage in stages for name, each in stage.trains.items()}
    now = {name: kind._replace(trains=trains.get(name, kind.trains)) for name, kind in kinds.items()}
    return with_unused(groups, now, _unused(state, kinds))


def _unused(state: State, names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in state.index.specs]


def load_full_optimizer_state(state: State, optimizer: Optimizer, saved: Mapping[str, Any], kinds: Kinds) -> None:
    """The inverse, in place: of what `full_optimizer_state` gave under any plan, or of the plain model's optimizer with the same
    groups. Every rank has `saved`."""
    described = _describe(state, optimizer, {})
    members = {name for group in described.groups for name in group}
    numbers = _saved_numbers(state, saved, kinds, state.on_all_stages(described))
    optimizer.state.clear()
    for name, parameter in state.parameters.items():
        if name in members and (values := saved["state"].get(numbers.get(name))):
            _check_fits(name, parameter, values)
            optimizer.state[parameter] = {key: _sharded(state, name, parameter, value) for key, value in values.items()}
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        own.update({key: value for key, value in group.items() if key not in ("params", "param_names")})


def _saved_numbers(state: State, saved: Mapping[str, Any], kinds: Kinds, stages: Sequence[_Described]) -> dict[str, int]:
    """Return the number of each parameter in the saved state: by name where it has names, else by its position in the group, in
    which those that no forward uses have no state."""
    groups, unused = saved["param_groups"], _unused(state, kinds)
    joined = joined_groups([each.groups for each in stages])
    if len(groups) != len(joined):
        raise StateError(f"the saved optimizer has {len(groups)} groups, this one has {len(joined)}: give it the same groups")
    numbers: dict[str, int] = {}
    named = all(kinds.keys() >= set(group.get("param_names", ("",))) for group in groups)
    full = [list(names) for names in joined] if named else []
    if not named:
        joined = ordered_groups([each.groups for each in stages], list(kinds))
        full, _ = _with_unused(state, joined, kinds, stages)
    for index, (group, names) in enumerate(zip(groups, joined, strict=True)):
        places, more = group["params"], len(group["params"]) - len(names)
        if named:
            names = list(group["param_names"])
            odd = sorted(set(names).symmetric_difference(joined[index]).difference(unused))
            if odd:
                raise StateError(f"group {index} of the saved optimizer has other parameters ({odd[0]}): give it the same groups")
        elif more:
            what = f"group {index} of the saved optimizer has {len(places)} parameters, this one has {len(names)}"
            if not 0 < more <= len(unused):
                raise StateError(f"{what}: give it the same groups")
            with_state = [number for number in places if saved["state"].get(number)]
            if len(with_state) in (0, len(names)):
                places, names = with_state, names[: len(with_state)]
            elif len(full[index]) == len(places):
                names = full[index]
            else:
                raise StateError(
                    f"{what}, and which one no forward uses ({unused[0]}) is not known: give the groups of the saved state "
                    "param_names, the names of their parameters"
                )
        numbers |= dict(zip(names, places, strict=True))
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
