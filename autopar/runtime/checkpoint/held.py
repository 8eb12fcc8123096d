"""The state that a checkpoint is made of, of a parallel model and of a plain one: tensors by name and plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..device.mesh import MeshHandle
from ..errors import StateError
from ..plain.optimizer_groups import names_by_group
from ..plain.plain_model import PlainModel, first_names
from ..state.materialize import State


@dataclass
class HeldState:
    """The state of this rank, by the original names. `others`: whole tensors of the model that its program does not read.
    `extra`: entries of its state dict that are no tensors of its own. `writes`: whether this rank's stage is the one that saves
    a parameter or buffer. `on_all_stages`: the value of each stage. `load_others` takes over `others` and `extra`; `reseed`
    restarts the random streams of the program. `plan`: its plan in words and a digest, where it has one."""

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
        parameters=state.parameters,
        buffers={name: b for name, b in state.buffers.items() if specs[name].persistent and (saved is None or name in saved)},
        others=dict(plain.unused) if plain is not None else {},
        extra=plain.extra if plain is not None else {},
        device=mesh.device,
        load_others=load_others,
        writes=lambda name: name not in state.index.holders or state.index.holders[name][0] == mesh.pp.coordinate,
        on_all_stages=state.on_all_stages,
        mesh=mesh,
        axes={**mesh.pipeline_axes, **mesh.launched_axes},
        reseed=reseed,
        plan=plan,
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
    """Return the names of this rank's parameters in each group. StateError where the optimizer has one of another model, or state
    that belongs to none."""
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    odd = next((key for key in optimizer.state if id(key) not in members), None)
    if odd is not None:
        what = f"under {odd!r}" if isinstance(odd, str) else "of a tensor that is in no group"
        raise StateError(f"{type(optimizer).__name__} has state {what}, which belongs to no parameter: save it through extra=")
    return names_by_group(held.parameters, optimizer)
