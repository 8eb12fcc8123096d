"""Sources of the full tensors that a program is filled from: a mapping or a function by original name; of a model on the meta
device a state by name, and buffers that are in no checkpoint (rotary frequencies)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from ..errors import StateError

WeightSource = Callable[[str], torch.Tensor] | Mapping[str, torch.Tensor]
"""Full tensors by original name."""


def full_weight(source: WeightSource, name: str) -> torch.Tensor:
    """The full tensor. StateError if there is none."""
    try:
        return source[name] if isinstance(source, Mapping) else source(name)
    except KeyError:
        raise StateError(f"the state has no {name!r}; pass the state dict of the model that was planned") from None


class OrderedSource:
    """Asks a source for all `names` in one order on every rank, and holds those in `wanted` until they are asked for.

    Tensors that are asked for in another order are held here, so the orders should be nearly equal. A mapping is read directly.
    """

    def __init__(self, source: WeightSource, names: Iterable[str], wanted: Iterable[str]) -> None:
        self.source, self.names, self.wanted = source, iter(tuple(names)), frozenset(wanted)
        self.held: dict[str, torch.Tensor] = {}
        if isinstance(source, Mapping):
            for name in self.names:
                if name not in source:
                    full_weight(source, name)

    def __call__(self, name: str) -> torch.Tensor:
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
    plain = {name: each for name, each in source.items() if type(each) in (torch.Tensor, nn.Parameter)}
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


class LazyWeight(torch.Tensor):
    """A full tensor that is read only where it is looked at: slices and reshapes of it are lazy too, and any other operation
    reads what they leave.

    `read` gives the elements at these positions along each dimension of the full tensor. `positions`: those that are left, by
    dimension of the full tensor; one that was reshaped into several has as many in its positions."""

    read: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    positions: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(
        cls, read: Callable[[Sequence[torch.Tensor]], torch.Tensor], positions: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Self:
        shape = [extent for each in positions for extent in each.shape]
        weight: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        weight.read, weight.positions = read, tuple(positions)
        return weight  # type: ignore[no-any-return]

    def whole(self) -> torch.Tensor:
        """Read what is left."""
        return self.read([each.flatten() for each in self.positions]).view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(args[0], LazyWeight) and not kwargs:
            left = _left(func, args[0].positions, args[1:])
            if left is not None:
                return LazyWeight(args[0].read, left, args[0].dtype)
        read: Any = tree_map_only(LazyWeight, LazyWeight.whole, (args, dict(kwargs or {})))
        return func(*read[0], **read[1])


def _left(func: Any, positions: tuple[torch.Tensor, ...], args: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """The positions after a slice, a selection or a reshape; None for other operations."""
    aten = torch.ops.aten
    if func in (aten.detach.default, aten.alias.default):
        return list(positions)
    if func in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
        return _reshaped(positions, list(args[0]))
    if func not in (aten.slice.Tensor, aten.select.int, aten.index_select.default):
        return None
    dim, out = (args[0] if args else 0) % sum(each.dim() for each in positions), list(positions)
    for number, each in enumerate(positions):
        if dim < each.dim():
            out[number] = func(each, dim, *args[1:])
            return out
        dim -= each.dim()
    return None


def _reshaped(positions: tuple[torch.Tensor, ...], shape: list[int]) -> list[torch.Tensor] | None:
    """Return the positions in a new shape; None where a dimension of the new shape would be made of several of the full
    tensor."""
    out: list[torch.Tensor] = []
    for number, each in enumerate(positions):
        extents, count = [], 1
        while shape and (count < each.numel() or number == len(positions) - 1):
            extents.append(shape.pop(0))
            count *= extents[-1]
        if count != each.numel():
            return None
        out.append(each.reshape(extents))
    return out


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
