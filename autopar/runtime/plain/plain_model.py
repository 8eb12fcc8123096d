"""The plain model that a parallel one was made from: the names of its state, its tensors and its attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from ..state.gradient import hooked
from .frozen_reads import FrozenReads
from .plain_attributes import PlainAttributes
from .plain_tensors import PlainTensors


class PlainModel:
    """`frozen`: what programs read of the `skeleton`, a copy on the meta device. `updated`: buffers that the forward writes into.
    `names`: each key of its state dict with the first name of that tensor. `unused`: tensors of the state that the program does
    not read. `extra`: entries of the state dict that are no parameters or buffers.
    `right_in`: whether the program computes what the model does in training (True) or evaluation (False)."""

    def __init__(
        self, model: nn.Module, frozen: FrozenReads, right_in: Callable[[bool], bool], updated: Collection[str] = ()
    ) -> None:
        self.frozen, self.skeleton, self.right_in = frozen, frozen.model, right_in
        self.training = self.skeleton.training
        first: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            first.setdefault(id(tensor), name)
        self.names: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and id(value) in first:
                self.names[key] = first[id(value)]
            else:
                self.extra[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        self.unused: dict[str, torch.Tensor] = {}
        self.parameter_names = [name for name, _ in model.named_parameters()]
        self._tensors, self._attributes = PlainTensors(model, updated), PlainAttributes(model)

    def copied(self) -> PlainModel:
        """Return it for another parallel model, whose attributes are its own."""
        out = copy.copy(self)
        out.frozen = self.frozen.copied(copy.deepcopy(self.skeleton))
        out.skeleton = out.frozen.model
        return out

    def check_unchanged(self, equal: Callable[[str, torch.Tensor], bool]) -> None:
        """RuntimeProblem where the plain model has changed since, which the parallel model does not see, unless its tensors are
        `equal` to those of the parallel model."""
        self._attributes.check_unchanged(self.frozen)
        self._tensors.check_unchanged(equal)

    def complete(self, held: Mapping[str, object], source: Callable[[str], torch.Tensor]) -> None:
        """Fetches the tensors of the state that the program does not have (every rank calls it)."""
        wanted = [name for name in dict.fromkeys(self.names.values()) if name not in held]
        self.unused = {name: source(name).detach().clone() for name in wanted}

    def state_dict(self, held: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Full tensors by name as the state dict of the plain model, which loads it strictly; tied names share one tensor."""
        every = {**self.unused, **held}
        return {key: every[name] for key, name in self.names.items()} | self.extra

    def canonical(self, state: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A state dict of the plain model by first names. Buffers that are in no state dict keep their values."""
        saved = set(self.names.values())
        out = {name: buffer for name, buffer in buffers.items() if name not in saved} | dict(state)
        for key, name in self.names.items():
            if key in state:
                out.setdefault(name, state[key])
        return out

    def load_unused(self, state: Mapping[str, Any]) -> None:
        """Takes over what the program does not have."""
        for key, name in self.names.items():
            if name in self.unused and key in state:
                self.unused[name] = state[key].detach().clone()
        self.extra |= {key: state[key] for key in self.extra if key in state}

    def unfit_keys(self, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Missing and unexpected keys of a state dict."""
        known = [*self.names, *self.extra]
        return [key for key in known if key not in state], [key for key in state if key not in known]


def hooked_modules(model: nn.Module) -> list[str]:
    """The paths of modules with a forward hook of the user."""
    return [path or type(model).__name__ for path, module in model.named_modules() if any(_own_hooks(module))]


def _own_hooks(module: nn.Module) -> Iterator[bool]:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        owner = getattr(hook, "__module__", None) or type(hook).__module__
        yield not str(owner).startswith("torch.")


def check_parameters(parameters: Mapping[str, nn.Parameter], may_train: Callable[[str], bool]) -> None:
    """Raise a StateError before a call where a parameter trains that may not, or one has a hook that would never run."""
    for name, parameter in parameters.items():
        if parameter.requires_grad and not may_train(name):
            raise StateError(
                f"{name} was frozen when the plan was made and requires a gradient now, which the program does not compute: call "
                "requires_grad_(True) before autopar.parallelize"
            )
        if hooked(parameter):
            raise StateError(f"{name} has a gradient hook, which would never run: change .grad after the backward instead")
