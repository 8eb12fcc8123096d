"""Types as a forward knows them: in a trace a size is a symbol and a tensor is fake, and ``isinstance(n, int)`` and
``type(x) is torch.Tensor`` would be false.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from autopar.capture.tracing.places import is_users
from autopar.runtime.compat.hooks import replaced

_NUMBERS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
_TENSORS: tuple[type, ...] = (FakeTensor, FunctionalTensor)
_NO_FORWARDS = sys.stdlib_module_names | {__name__.partition(".")[0]}


class _TypeOfType(type):
    """Makes `Type` do as ``type`` does, but for values of a trace."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> type:
        if len(arguments) > 1 or keywords:
            return type(*arguments, **keywords)
        kind = type(*arguments)
        if kind in _TENSORS:
            return nn.Parameter if isinstance(arguments[0], nn.Parameter) else torch.Tensor
        return type(_NUMBERS.get(kind, arguments[0]))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)


class Type(type, metaclass=_TypeOfType):
    """Stands for ``type`` in modules of the user."""


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) or (type(value) in _NUMBERS and isinstance(_NUMBERS[type(value)], kinds))


@contextmanager
def plain_types(model: nn.Module) -> Iterator[None]:
    """Let ``isinstance`` and ``type`` take a symbol for a number and a fake tensor for a tensor, in the modules of the classes
    of `model` and in those of the user whose functions, classes or modules these name."""
    names = [kind.__module__ for each in model.modules() for kind in type(each).__mro__]
    modules: dict[str, ModuleType] = {}
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if module is None or name in modules or name.partition(".")[0] in _NO_FORWARDS:
            continue
        if is_users(getattr(module, "__file__", None) or "<"):
            modules[name] = module
            for value in vars(module).values():
                if isinstance(value, ModuleType):
                    names.append(value.__name__)
                elif isinstance(value, FunctionType | type):
                    names.append(value.__module__)
    with ExitStack() as hooks:
        for module in modules.values():
            hooks.enter_context(replaced(module, "isinstance", _is_instance))
            hooks.enter_context(replaced(module, "type", Type))
        yield
