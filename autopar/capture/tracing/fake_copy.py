"""Copies of a model without data: on the meta device, or as fake tensors of the device that the model is on.

Models ask for devices (``torch.autocast(x.device.type)``, ``x.to(table.device)``) and make tensors on the default one, so they
are traced on the device where they run; nothing is allocated there.

Parameters and buffers that a module also keeps in a plain dictionary or list: export puts what it traces in the place of the
registered ones only, so these containers read from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from autopar.errors import CaptureError


def refuse_uninitialized(model: nn.Module) -> None:
    """CaptureError for parameters and buffers of lazy modules, whose shapes the first call tells."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(f"{name} has no shape yet (a lazy module): call the model once on example inputs before this")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model: where most of its parameters and buffers are, the CPU for the meta device or none."""
    tensors = (*model.parameters(), *model.buffers())
    devices = [tensor.device for tensor in tensors if not tensor.is_meta]
    return max(set(devices), key=devices.count) if devices else torch.device("cpu")


def copy_without_data(model: nn.Module, compute_dtype: torch.dtype | None) -> nn.Module:
    """A deep copy on the meta device; floating parameters in `compute_dtype`. Ties stay ties. Functions of a module that refer to
    the model (a lambda over a submodule) refer to the copy."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = compute_dtype if compute_dtype is not None and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for module in model.modules():  # what torch.nn.utils.weight_norm computed last cannot be copied deeply
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach()
    clone = copy.deepcopy(model, memo)
    for module in clone.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__closure__ is not None:
                vars(module)[name] = _rebound(value, memo)
    return clone


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function with the copies of what it refers to."""
    known = [(cell, memo.get(id(cell.cell_contents))) for cell in function.__closure__ or ()]
    cells = tuple(cell if copied is None else CellType(copied) for cell, copied in known)  # others may get another value later
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def has_no_data(tensor: Tensor) -> bool:
    """Return whether a tensor has no values: they may be anything."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@contextmanager
def fake_tensors() -> Iterator[Callable[[nn.Module, torch.dtype | None], nn.Module]]:
    """While active, `torch.export` works on fake tensors of one mode. Yields what makes a copy of a model in this mode."""
    environment = ShapeEnv(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False, trace_asserts=True)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True, export=True)
    mode.cache_enabled = False  # a layer is traced once: to keep its results costs more than they save, a sixth of an export

    def fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        return _fake_copy(model, dtype, mode)

    with tracing(TracingContext(mode)):
        yield fake_copy


def _fake_copy(model: nn.Module, dtype: torch.dtype | None, mode: FakeTensorMode) -> nn.Module:
    clone, device = copy_without_data(model, dtype), device_of(model)
    made: dict[int, Any] = {}

    def fake(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in made:
            made[id(tensor)] = empty = FakeTensor(mode, tensor.detach(), device)
            if isinstance(tensor, nn.Parameter):  # as nn.Parameter does, without a dispatched detach
                empty.requires_grad_(tensor.requires_grad)
                empty._is_param = True
        return made[id(tensor)]

    read_from_modules(clone)
    for module in clone.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = fake(parameter)
        for name, buffer in module._buffers.items():
            module._buffers[name] = fake(buffer)
    for module in clone.modules():  # a further name of a parameter that is no parameter there
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and id(value) in made:
                vars(module)[name] = made[id(value)]
    return clone


Home = tuple[nn.Module, str]
"""A module, and the attribute that a parameter or buffer of it is."""


def read_from_modules(model: nn.Module) -> None:
    """The containers of `model`, in place: what they hold of its parameters and buffers is read from the modules."""
    homes: dict[int, Home] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                homes.setdefault(id(tensor), (module, name))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in vars(nn.Module()) and type(value) in (dict, list):
                vars(module)[name] = _live(value, homes)


def _live(value: Any, homes: Mapping[int, Home]) -> Any:
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    own = {key: homes[id(each)] for key, each in pairs if isinstance(each, Tensor) and id(each) in homes}
    if not own:
        return value
    made = _LiveDict(value) if isinstance(value, dict) else _LiveList(value)
    made.homes = own
    return made


class _LiveDict(dict[Any, Any]):
    homes: Mapping[Any, Home]

    def __getitem__(self, key: Any) -> Any:
        return getattr(*self.homes[key]) if key in self.homes else super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (it is what get is)

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()


class _LiveList(list[Any]):
    homes: Mapping[int, Home]

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Any]:
        for index, each in enumerate(super().__iter__()):
            yield getattr(*self.homes[index]) if index in self.homes else each
