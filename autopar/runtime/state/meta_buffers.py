"""Values for a model on the meta device: a state by name, and buffers that are in no checkpoint (rotary frequencies)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping

import torch
from torch import nn

from ..errors import StateError
from .weight_source import named_tensors


def named_state(model: nn.Module, state: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name, under every name that a tied one has; those in `state` from there."""
    own, given = named_tensors(model), dict(state or {})
    by_tensor = {id(own[name]): tensor for name, tensor in given.items() if name in own}
    return {name: by_tensor.get(id(tensor), tensor) for name, tensor in own.items()} | given


def fill_missing(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Puts values in place of buffers on the meta device that are in no checkpoint, where their module can compute them: its
    `reset_parameters()`, or the model's `_init_weights` (Hugging Face). StateError where a tensor is left without."""
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    buffers = dict(model.named_buffers(remove_duplicate=False)) if missing else {}
    saved = model.state_dict(keep_vars=True) if missing else {}
    for name in missing:
        if name in saved or name not in buffers:
            raise StateError(f"{name} is on the meta device and has no values: pass state={{name: tensor}} or build it on cpu")
        found = _computed(model, name)
        if found is None:
            raise StateError(
                f"{name} is on the meta device, and no checkpoint has it (persistent=False): pass it in state=, give its module "
                "a reset_parameters() that computes it, or build the model on cpu"
            )
        tensors[name] = found


def _computed(model: nn.Module, name: str) -> torch.Tensor | None:
    """The buffer as its module initialises it, None where that leaves it as it was."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    for initialise in (getattr(type(owner), "reset_parameters", None), getattr(model, "_init_weights", None)):
        if initialise is None:
            continue
        module = copy.deepcopy(owner).to_empty(device="cpu")
        buffer = getattr(module, leaf)
        _spoil(buffer)
        with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception), torch.no_grad():
            initialise(module)
        found: torch.Tensor = getattr(module, leaf)
        if not found.is_meta and found.shape == buffer.shape and not _spoiled(found):
            return found.detach().clone()
    return None


def _spoil(buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.bool:
        buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)


def _spoiled(buffer: torch.Tensor) -> bool:
    """Whether a part of it still has what `_spoil` wrote."""
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype == torch.bool or bool((buffer == torch.iinfo(buffer.dtype).min).any())
