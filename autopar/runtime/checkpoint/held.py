"""The state that a checkpoint is made of, of a parallel model and of a plain one: tensors by name and plain values; of an
optimizer tensors by the names of their parameters, and how each is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..compat.dtensor import gathered, local_of, over_local, placed_like, replicated
from ..device.mesh import MeshHandle
from ..errors import CheckpointProblem, DamagedCheckpoint, StateError
from ..plain.optimizer_state import names_by_group
from ..plain.plain_model import PlainModel, first_names
from ..state.model_state import State
from ..state.stage_tensors import OnAnotherStage, held_by, holders_of, on_another_stage
from .manifest import Manifest


@dataclass
class HeldState:
    """The state of this rank, by the original names. `others`: whole tensors of the model that its program does not read.
    `extra`: entries of its state dict that are no tensors of its own. `writes`: whether this rank's stage is the one that saves
    a parameter or buffer. `on_all_stages`: the value of each stage. `load_others` takes over `others` and `extra`; `reseed`
    restarts the random streams of the program. `plan`: its plan in words and a digest, where it has one. `elsewhere`: parameters
    of other stages of a pipeline."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    others: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    device: torch.device
    load_others: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], None]
    writes: Callable[[str], bool] = lambda name: True
    on_all_stages: Callable[[Any], list[Any]] = lambda value: [value]
    mesh: MeshHandle | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    reseed: Callable[[int], None] = lambda seed: None
    plan: str = ""
    elsewhere: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def seed(self) -> int | None:
        """The seed of the program's random streams; None of a plain model, which has none."""
        mesh = self.mesh
        return None if mesh is None else mesh.base_seed

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the model on this rank by their name in a checkpoint."""
        every = {**self.parameters, **self.buffers, **self.others}
        return {f"model.{name}": tensor.detach() for name, tensor in every.items()}


def held_by_parallel(state: State, plain: PlainModel | None, reseed: Callable[[int], None], plan: str = "") -> HeldState:
    """Return the state of a parallel model: the shards of this rank."""
    mesh, specs, saved = state.mesh, state.index.specs, set(plain.names.values()) if plain is not None else None

    def load_others(tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        if plain is not None:
            plain.load_unused({key: tensors[name] for key, name in plain.names.items() if name in tensors} | dict(extra))

    return HeldState(
        parameters={**state.parameters, **state.unused},
        buffers={name: b for name, b in state.buffers.items() if specs[name].persistent and (saved is None or name in saved)},
        others={name: each for name, each in plain.unused.items() if name not in state.unused} if plain is not None else {},
        extra=plain.extra if plain is not None else {},
        device=mesh.device,
        load_others=load_others,
        writes=lambda name: name not in state.index.holders or state.index.holders[name][0] == mesh.pp.coordinate,
        on_all_stages=state.on_all_stages,
        mesh=mesh,
        axes={**mesh.pipeline_axes, **mesh.launched_axes},
        reseed=reseed,
        plan=plan,
        elsewhere={name: each for name, each in state.elsewhere.items() if not specs[name].buffer},
    )


def held_by_plain(model: nn.Module) -> HeldState:
    """Return the state of a plain model on one process."""
    names, extra = first_names(model)
    saved, parameters = set(names.values()), dict(model.named_parameters())
    buffers = {name: each for name, each in model.named_buffers() if name in saved}

    def load_others(tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        if extra:
            model.load_state_dict(dict(extra), strict=False)

    device = next((each.device for each in parameters.values()), torch.device("cpu"))
    return HeldState(parameters, buffers, {}, extra, device, load_others)


Optimizers = Optimizer | Sequence[Optimizer] | None


def as_optimizers(optimizer: Optimizers) -> list[Optimizer]:
    """Return one optimizer, several, or none as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def grouped_names(held: HeldState, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group. StateError where the optimizer has one of another model, or state
    that belongs to none."""
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    odd = next((key for key in optimizer.state if id(key) not in members), None)
    if odd is not None:
        what = f"under {odd!r}" if isinstance(odd, str) else "of a tensor that is in no group"
        raise StateError(f"{type(optimizer).__name__} has state {what}, which belongs to no parameter: save it through extra=")
    return names_by_group({**held.parameters, **held.elsewhere}, optimizer)


LIKE, WHOLE, CPU, DEVICE, VALUE = "like", "whole", "cpu", "device", "value"
"""The ways to keep a value: placed like its parameter; with another shape, whole on every rank; a number in a tensor on the CPU,
or on the device; no tensor."""

Described = dict[str, Any]
"""``class``, ``groups`` (each with the ``names`` of its parameters and its ``options``), and ``state``: by name and key how a
value is kept, or ``["value", value]``."""


def tensor_name(index: int, name: str, key: str) -> str:
    """The name of a tensor of the state in a checkpoint."""
    return f"optimizer{index}.{name}.{key}"


def describe(held: HeldState, optimizer: Optimizer, index: int) -> tuple[Described, dict[str, torch.Tensor]]:
    """Return the state of this rank: plain values, and the tensors. StateError for state that cannot be sharded."""
    groups = grouped_names(held, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[str, dict[str, Any]] = {}
    for name, parameter in held.parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            how = kept.setdefault(name, {})[key] = _how(parameter, name, key, value)
            if isinstance(value, torch.Tensor):
                tensors[tensor_name(index, name, key)] = gathered(_on_this_stage(value)) if how == WHOLE else value.detach()
    options = [{key: _on_cpu(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    described = {
        "class": type(optimizer).__name__,
        "groups": [{"names": names, "options": each} for names, each in zip(groups, options, strict=True)],
        "state": kept,
    }
    return described, tensors


def _on_this_stage(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as its own stage alone has it: the others save theirs, and do not come here for this one."""
    return over_local(DTensor, value) if isinstance(value, DTensor) else value


def _how(parameter: torch.Tensor, name: str, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (list, tuple, dict, set)) or callable(value):
            raise StateError(f"the optimizer's {key} of {name} is no tensor or number (a history?): save without the optimizer")
        return [VALUE, value]
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim():
        raise StateError(
            f"the optimizer's {key} of {name} is a plain tensor of shape {tuple(value.shape)}, of which nothing says how ranks "
            "share it: make it with torch.zeros_like(parameter)"
        )
    sharded = isinstance(value, DTensor)
    if sharded == isinstance(parameter, DTensor) and value.shape == parameter.shape and (sharded or value.dim()):
        return LIKE
    if sharded or value.dim():
        return WHOLE
    return CPU if value.device.type == "cpu" else DEVICE


def _on_cpu(value: Any) -> Any:
    return gathered(value).cpu().clone() if isinstance(value, torch.Tensor) else value


def merged(stages: Sequence[Described]) -> Described:
    """Join the states of a pipeline's stages."""
    state: dict[str, Any] = {}
    for each in stages:
        state = {**each["state"], **state}
    return {**stages[0], "state": state}


def check_groups(groups: Sequence[Sequence[str]], whole: bool, optimizer: Optimizer, saved: Described, index: int) -> None:
    """Raise a StateError where the groups of the optimizer are other ones than the saved ones. `groups`: the names in each.
    `whole`: of a plain model, whose optimizer may have parameters that the program does not read."""
    which = f"optimizer {index}" if index else "the optimizer"
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise StateError(
            f"{which} of the checkpoint has {len(saved['groups'])} groups, this one has {len(optimizer.param_groups)}: give it "
            "the same groups"
        )
    for number, (group, own) in enumerate(zip(saved["groups"], groups, strict=True)):
        other = set(group["names"]).difference(own) if whole else set(group["names"]).symmetric_difference(own)
        if other:
            raise StateError(
                f"group {number} of {which} has other parameters than that of the checkpoint ({min(other)}): give it the same "
                "groups"
            )


def state_from_manifest(
    held: HeldState, optimizer: Optimizer, saved: Described, index: int, manifest: Manifest
) -> tuple[dict[torch.Tensor, dict[str, Any]], dict[str, torch.Tensor]]:
    """The state as this rank keeps it, and its tensors, to be read, by their name in the checkpoint."""
    state: dict[torch.Tensor, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    members = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in {**held.parameters, **held.elsewhere}.items():
        if id(parameter) not in members:
            continue
        for key, how in saved["state"].get(name, {}).items():
            if isinstance(how, (list, tuple)):
                state.setdefault(parameter, {})[key] = how[1]
                continue
            stored = tensor_name(index, name, key)
            if stored not in manifest.tensors:
                raise DamagedCheckpoint(f"the checkpoint names {stored}, and does not have it")
            kind = manifest.tensors[stored]
            if how == LIKE and kind.shape != tuple(parameter.shape):
                raise CheckpointProblem(
                    f"{name} has shape {tuple(parameter.shape)} and in the checkpoint {kind.shape}: build the same model"
                )
            value = _empty(parameter, how, kind.shape, kind.torch_dtype, held.device)
            if how == CPU and key == "step" and _on_device(members[id(parameter)]):
                value = value.to(held.device)
            state.setdefault(parameter, {})[key] = value
            if not isinstance(value, OnAnotherStage):
                tensors[stored] = value
    return state, tensors


def _on_device(group: Mapping[str, Any]) -> bool:
    """Return whether the optimizer counts its steps on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def _empty(parameter: torch.Tensor, how: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if how in (CPU, DEVICE):
        return torch.empty(shape, dtype=dtype, device="cpu" if how == CPU else device)
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    holders = holders_of(parameter)
    if isinstance(parameter, OnAnotherStage) and holders is not None:
        return on_another_stage(shape, dtype, holders)
    if how == WHOLE:
        value = replicated(torch.empty(shape, dtype=dtype, device=device), parameter.device_mesh)
    else:
        value = placed_like(torch.empty(local_of(parameter).shape, dtype=dtype, device=device), parameter)
    out: torch.Tensor = held_by(value, holders)
    return out


def set_state(optimizer: Optimizer, state: Mapping[torch.Tensor, dict[str, Any]], saved: Described) -> None:
    """Give the optimizer the state, and its groups the saved options, in place: schedulers hold them."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in kept["options"].items():
            before = group.get(key)
            group[key] = (
                value.to(before.device) if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor) else value
            )
