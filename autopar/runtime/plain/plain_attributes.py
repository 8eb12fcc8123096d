"""The attributes of the plain model, as the parallel model has them, and those that programs read, which are watched."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..errors import AttributeProblem, RuntimeProblem
from .frozen_reads import LEAVES, Fields, FrozenReads, Reads, leaves, read_attributes
from .methods import call_method

_LIBRARIES = ("torch", "transformers", "diffusers")
_MISSING = object()


class PlainAttributes:
    """The attributes of the plain model that programs read, which are not seen there once the parallel model has its own."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, weakref.ref(module)) for path, module in model.named_modules()]
        self._reads: Reads | None = None
        self._fields: Fields = {}
        self._before: dict[str, tuple[weakref.ref[nn.Module], str, Any]] = {}

    def check_unchanged(self, frozen: FrozenReads) -> None:
        """Raise a RuntimeProblem where one is another now, and not the same on the parallel model."""
        if place := self._changed(frozen):
            raise RuntimeProblem(
                f"{place} of the plain model was changed after autopar.parallelize, which the parallel model does not see: set "
                "it on the parallel model (too); for another value in the plain model take a copy (copy.deepcopy) of it"
            )

    def _changed(self, frozen: FrozenReads) -> str:
        """The place of one that is another now, and not the same on the parallel model; empty where none is."""
        if self._reads != frozen.reads:
            self._take(frozen)
        unchanged: set[tuple[int, int]] = set()  # settings that many modules share are looked into once
        for place, (reference, name, before) in self._before.items():
            if (module := reference()) is None:
                continue
            value = vars(module).get(name, _MISSING)
            if value is before or (id(value), id(before)) in unchanged:
                continue
            now = _content(value, self._fields)
            if all(map(dict(_content(before, {})).items().__contains__, now)):
                unchanged.add((id(value), id(before)))
                continue
            path = place.removesuffix(name).removesuffix(".")
            if now != _content(vars(frozen.model.get_submodule(path)).get(name, _MISSING), self._fields):
                return place
        return ""

    def _take(self, frozen: FrozenReads) -> None:
        """Take down the values of attributes that are read for the first time."""
        self._reads, self._fields = frozen.reads, frozen.reads.fields_by_class()
        modules = [(path, module) for path, each in self._modules if (module := each()) is not None]
        contents: dict[int, _Content] = {}
        for place, module, name in read_attributes(modules, frozen.reads):
            value = vars(module).get(name, _MISSING)
            if place not in self._before and name != "training" and not frozen.is_written(module, name):
                if not isinstance(value, LEAVES):
                    value = contents.setdefault(id(value), _Content(value, {}))
                self._before[place] = weakref.ref(module), name, value


_RESETS = ("reset_parameters", "_reset_parameters", "reset_running_stats", "_fill_padding_idx_with_zero")
"""Methods of torch's modules that write into parameters and buffers, and do no more."""


_COUNTS = ("num_parameters", "get_memory_footprint")
"""Methods of libraries that count parameters and buffers, and do no more: as users' own ones."""


class _Content(list[tuple[str, Any]]):
    """The plain values in an object, which is not kept. None of code and tensors, which would be."""

    def __init__(self, value: Any, fields: Fields) -> None:
        values = leaves("", value, fields) if value is not _MISSING else ()
        super().__init__((where, each if isinstance(each, LEAVES) else type(each).__qualname__) for where, each in values)


def _content(value: Any, fields: Fields) -> _Content:
    return value if isinstance(value, _Content) else _Content(value, fields)


def attribute_of(frozen: FrozenReads, skeleton: nn.Module, node: nn.Module, name: str) -> Any:
    """Return an attribute of a module of the model (`skeleton`, without data) that is no module or tensor, or a method of its own
    class for the `node` that stands for it (`call_method`). AttributeProblem where there is none, or the forward has set it."""
    check_attribute(frozen, skeleton, name)
    if name in _RESETS and isinstance(reset := inspect.getattr_static(type(skeleton), name, None), FunctionType):
        return partial(reset, node)
    tensor = next((each[name] for each in (skeleton._parameters, skeleton._buffers, skeleton._modules) if name in each), _MISSING)
    if tensor is None:  # the bias of a layer without one
        return None
    if isinstance(tensor, torch.Tensor):
        path = node.__dict__["assignments"].paths.get(id(node), "")
        raise AttributeProblem(
            f"{path}{'.' if path else ''}{name} is used by no forward, and not on the parallel model: parallel.full_state() has "
            "it, and what initialises it (apply) is called on the plain model before autopar.parallelize"
        )
    if name.startswith("_") and isinstance(value := skeleton.__dict__.get(name, _MISSING), LEAVES):
        return value
    private = name.startswith("__") or (name.startswith("_") and _library(type(skeleton)))
    own = name in skeleton.__dict__ or hasattr(type(skeleton), name)
    if not private and not own and (forwarded := _forwarded(skeleton, node, name)):
        return forwarded[0]
    if private or not own:
        remedy = ": leave it out, a parallel model is no wrapper" if name == "module" else ""  # of DistributedDataParallel
        raise AttributeProblem(f"neither the parallel model nor {type(skeleton).__name__} has an attribute {name!r}{remedy}")
    if name in skeleton.__dict__:
        value = skeleton.__dict__[name]
        if not isinstance(value, torch.Tensor):
            return value
    attribute = inspect.getattr_static(type(skeleton), name, None)
    owner = next((each for each in type(skeleton).__mro__ if name in each.__dict__), type(None))
    if not _library(owner) or name in _COUNTS:
        if isinstance(attribute, FunctionType):
            return partial(call_method, attribute, skeleton, node)
        if isinstance(attribute, (staticmethod, classmethod)):
            return getattr(type(skeleton), name)
        if isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
            return call_method(attribute.fget, skeleton, node)
        if isinstance(attribute, type) or (attribute is not None and not callable(attribute)):
            return attribute
    elif isinstance(attribute, property) and isinstance(value := getattr(skeleton, name), (bool, int, float, str)):
        return value  # is_gradient_checkpointing of transformers
    remedy = "load parallel.full_state() into a plain model"
    if "checkpointing" in name:  # gradient_checkpointing_enable of transformers, enable_gradient_checkpointing of diffusers
        remedy = "leave it out, the plan decides what is recomputed"
    raise AttributeProblem(f"{type(skeleton).__name__}.{name} is not there on the parallel model: {remedy}")


def _library(kind: type) -> bool:
    """Return whether a class is of a library whose methods would work on whole tensors (those of torch's lists do not)."""
    return kind.__module__.split(".")[0] in _LIBRARIES and kind.__module__ != nn.ModuleList.__module__


def own_names(model: nn.Module) -> list[str]:
    """Return the public names of a model's modules, tensors and attributes, and of the methods of its own classes, without those
    of nn.Module."""
    methods = (name for kind in type(model).__mro__ if not _library(kind) for name in vars(kind))
    names = dict.fromkeys((*model._modules, *model._parameters, *model._buffers, *vars(model), *methods))
    return [name for name in names if not (name.startswith("_") or name == "training" or hasattr(nn.Module, name))]


def _forwarded(skeleton: nn.Module, node: nn.Module, name: str) -> tuple[Any, ...]:
    """Return what a class with a ``__getattr__`` of its own finds inside, as PeftModel does, for the node of that module, in a
    tuple; empty where it finds nothing."""
    finder = inspect.getattr_static(type(skeleton), "__getattr__", None)
    if finder is nn.Module.__getattr__ or name in skeleton._modules:
        return ()
    value = getattr(skeleton, name, _MISSING)
    owner = getattr(value, "__self__", None)
    if value is _MISSING or isinstance(value, torch.Tensor):
        return ()
    for path, module in skeleton.named_modules():
        if path and module is value:
            return (node.get_submodule(path),)
        if path and module is owner:
            return (getattr(node.get_submodule(path), name),)
    return (value,)


def check_attribute(frozen: FrozenReads, model: nn.Module, name: str) -> None:
    """Raise an AttributeProblem for an attribute that the forward sets, whose value the parallel model does not have."""
    if frozen.is_written(model, name):
        raise AttributeProblem(
            f"{type(model).__name__}.{name} is set by the forward, which a parallel program does not do: return it from the "
            "forward, or make it a buffer"
        )
