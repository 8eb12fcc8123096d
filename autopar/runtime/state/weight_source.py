"""Sources of the full tensors that a program is filled from: a mapping or a function by original name; of a model on the meta
device a state by name, and buffers that are in no checkpoint (rotary frequencies)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm.agreement import refused_together
from ..device.mesh import MeshHandle
from ..errors import StateError, StateMismatch
from ..module import ParameterSpec
from ..progress import advance


class WeightInParts(NamedTuple):
    """A full tensor of which each rank reads its part. `read` gives the elements at these positions along each dimension."""

    shape: tuple[int, ...]
    read: Callable[[Sequence[torch.Tensor]], torch.Tensor]


Weight = torch.Tensor | WeightInParts
WeightSource = Callable[[str], Weight] | Mapping[str, Weight]
"""Full tensors by original name."""


def whole_weight(weight: Weight) -> torch.Tensor:
    """The full tensor, all of which is read."""
    return weight.read([torch.arange(size) for size in weight.shape]) if isinstance(weight, WeightInParts) else weight.detach()


def full_weight(source: WeightSource, name: str) -> Weight:
    """The full tensor. StateError if there is none."""
    try:
        return source[name] if isinstance(source, Mapping) else source(name)
    except KeyError:
        raise StateMismatch(f"the state has no {name!r}; pass the state dict of the model that was planned") from None


class OrderedSource:
    """Asks a source for all `names` in one order on every rank, and holds those in `wanted` until they are asked for.

    Tensors that are asked for in another order are held here, so the orders should be nearly equal. A mapping is read directly.
    """

    def __init__(self, source: WeightSource, names: Iterable[str], wanted: Iterable[str]) -> None:
        self.source, self.names, self.wanted = source, iter(tuple(names)), frozenset(wanted)
        self.held: dict[str, Weight] = {}
        if isinstance(source, Mapping):
            for name in self.names:
                if name not in source:
                    full_weight(source, name)

    def __call__(self, name: str) -> Weight:
        if isinstance(self.source, Mapping):
            return full_weight(self.source, name)
        while name not in self.held:
            self._next(next(self.names))
        return self.held.pop(name)

    def _next(self, name: str) -> None:
        full = full_weight(self.source, name)
        if name in self.wanted:
            self.held[name] = full

    def finish(self) -> None:
        """Ask for the remaining names, as other ranks do."""
        for name in self.names:
            self._next(name)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name, under every name that a tied one has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def further_names(source: WeightSource, held: Collection[str]) -> dict[str, str]:
    """Return the names that a mapping has beyond those in `held` for tensors of the same memory, each with the name in `held`:
    tied weights, which ``torch.save`` writes once."""
    if not isinstance(source, Mapping) or source.keys() <= set(held):
        return {}
    plain: dict[str, Any] = {name: each for name, each in source.items() if type(each) in (torch.Tensor, nn.Parameter)}
    first = {memory_of(each): name for name, each in plain.items() if name in held}
    others = {name: memory_of(each) for name, each in plain.items() if name not in held}
    return {name: first[memory] for name, memory in others.items() if memory in first}


def memory_of(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common that are one tensor (a state dict has others than the model)."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


class BroadcastSource:
    """Broadcasts the tensors of rank 0, so that models which were initialised with different seeds start from one state.

    Every rank asks for the same names in the same order; ranks other than 0 need shapes and dtypes only.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, name: str) -> torch.Tensor:
        own = self.tensors[name].detach()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        full = own.to(device).contiguous() if dist.get_rank() == 0 else torch.empty(own.shape, dtype=own.dtype, device=device)
        dist.broadcast(full, src=0)
        return full


def named_state(model: nn.Module, state: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name, under every name that a tied one has; those in `state` from there."""
    own, passed = named_tensors(model), dict(state or {})
    by_tensor = {id(own[name]): tensor for name, tensor in passed.items() if name in own}
    return {name: by_tensor.get(id(tensor), tensor) for name, tensor in own.items()} | passed


def fill_missing(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Put values in place of buffers on the meta device that are in no checkpoint, where their module can compute them: its
    `reset_parameters()`, or the model's `_init_weights` (Hugging Face). StateError where a tensor is left without."""
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    buffers = dict(model.named_buffers(remove_duplicate=False)) if missing else {}
    saved = model.state_dict(keep_vars=True) if missing else {}
    for name in missing:
        if name in saved or name not in buffers:
            raise StateError(f"{name} is on the meta device and has no values: pass state={{name: tensor}} or build it on cpu")
        value = _computed(model, name)
        if value is None:
            raise StateError(
                f"{name} is on the meta device, and no checkpoint has it (persistent=False): pass it in state=, give its module "
                "a reset_parameters() that computes it, or build the model on cpu"
            )
        tensors[name] = value


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
        value: torch.Tensor = getattr(module, leaf)
        if not value.is_meta and value.shape == buffer.shape and not _spoiled(value):
            return value.detach().clone()
    return None


def _spoil(buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.bool:
        buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)


def _spoiled(buffer: torch.Tensor) -> bool:
    """Return whether a part of it still has what `_spoil` wrote."""
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype == torch.bool or bool((buffer == torch.iinfo(buffer.dtype).min).any())


@contextlib.contextmanager
def refused_on_all_stages(mesh: MeshHandle, source: WeightSource) -> Iterator[None]:
    """Refuse on all stages a state that one stage refuses, after all have asked for the same weights."""
    finish = source.finish if isinstance(source, OrderedSource) else lambda: None
    with refused_together(mesh.describe, asked=isinstance(source, OrderedSource), problem=StateMismatch):
        try:
            yield
        except StateError:
            finish()
            raise
        finish()


def checked_weight(source: WeightSource, name: str, spec: ParameterSpec) -> Weight:
    """Return a full tensor, of the shape of the plan. StateError for another one."""
    advance()
    full = full_weight(source, name)
    if tuple(full.shape) != tuple(spec.shape):
        raise StateMismatch(
            f"{name} has shape {tuple(full.shape)} but the plan is for {tuple(spec.shape)}: build the model that was saved, or "
            "leave it out and load with strict=False"
        )
    return full
