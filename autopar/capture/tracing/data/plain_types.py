"""Types as a forward knows them: in a trace a size is a symbol and a tensor is fake, and ``isinstance(n, int)`` and
``type(x) is torch.Tensor`` would be false.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from autopar.capture.tracing.places import is_users

_NUMBERS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
_TENSORS: tuple[type, ...] = (FakeTensor, FunctionalTensor)
_NO_FORWARDS = sys.stdlib_module_names - {"__main__"} | {__name__.partition(".")[0]}


class _Type:
    """Stands for ``type`` in modules of the user, and does as it does, but for values of a trace."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > 1 or keywords:
            return type(*arguments, **keywords)
        kind: Any = type(*arguments)
        if kind in _TENSORS:
            return nn.Parameter if isinstance(arguments[0], nn.Parameter) else torch.Tensor
        return self if kind is type else type(_NUMBERS.get(kind, arguments[0]))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, type)

    def __mro_entries__(self, bases: Any) -> tuple[type]:
        return (type,)  # of a metaclass

    def __eq__(self, other: object) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)

    def __getattribute__(self, name: str) -> Any:
        if name == "__mro_entries__":  # what Python asks an object for that is a base
            return object.__getattribute__(self, name)
        return getattr(type, name)  # also type.__new__, which a metaclass calls

    def __getitem__(self, item: Any) -> Any:
        return type[item]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __repr__(self) -> str:
        return repr(type)


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) or (type(value) in _NUMBERS and isinstance(_NUMBERS[type(value)], kinds))


_STAND_INS: dict[str, Any] = {"isinstance": _is_instance, "type": _Type()}


@contextmanager
def plain_types(model: nn.Module) -> Iterator[None]:
    """Let ``isinstance`` and ``type`` take a symbol for a number and a fake tensor for a tensor, in the modules of the classes
    of `model` and in those of the user whose functions, classes or modules these name."""
    before = set(sys.modules)
    changed = [
        (vars(module), name) for module in _modules_of(model) for name in _STAND_INS if name not in vars(module)
    ]  # a module may have a name of its own like that
    for names, name in changed:
        names[name] = _STAND_INS[name]
    try:
        yield
    finally:
        further = [getattr(module, "__dict__", {}) for name, module in list(sys.modules.items()) if name not in before]
        for names, name in (*changed, *((names, name) for names in further for name in _STAND_INS)):
            if names.get(name) is _STAND_INS[name]:  # further ones have it by an import of all names
                del names[name]


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """Return the modules of the user whose code a forward may run."""
    found: dict[str, ModuleType] = {}
    names = [kind.__module__ for each in model.modules() for kind in type(each).__mro__]
    names += [name for each in model.modules() for name in _module_names(vars(each))]
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if module is None or name in found or name.partition(".")[0] in _NO_FORWARDS:
            continue
        if name == "__main__" or is_users(getattr(module, "__file__", None) or "<"):
            found[name] = module
            names += _module_names(vars(module))
    return list(found.values())


def _module_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of modules that hold the code of these values, and of functions in dictionaries."""
    for value in values.values():
        if type(value) is dict and value is not vars(builtins):  # other mappings may import what they are asked for
            yield from (each.__module__ for each in value.values() if isinstance(each, FunctionType))
        value = value.func if isinstance(value, partial) else value
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, FunctionType | type):
            yield value.__module__
        else:
            yield type(value).__module__
