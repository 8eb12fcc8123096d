"""Reads of a forward's code that are no attributes: values of globals and closures, the mode of gradients, the environment, the
clock.

Found by the names in the code of every function that a forward can reach, of the user's own files only: a library's constants are
not what scripts change.
"""

from __future__ import annotations

import datetime
import dis
import functools
import inspect
import os
import sysconfig
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from .frozen_reads import LEAVES, NamedValue, setting_classes
from .questions import questions_of

_LIBRARIES = ("/site-packages/", "/dist-packages/", sysconfig.get_paths()["stdlib"], torch.__file__.rsplit("/", 1)[0])
_PRODUCT = __file__.rsplit("/runtime/", 1)[0] + "/"
_ENVIRONMENT = (os.environ, os.getenv)
_CLOCKS = (time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns)
_CLOCK_OWNERS = (time, datetime, datetime.datetime, datetime.date)
_CLOCK_NAMES = frozenset((*(each.__name__ for each in _CLOCKS), "now", "utcnow", "today"))
_GRADIENT_NAMES = frozenset(("is_grad_enabled", "requires_grad"))
_INFERENCE_MODE = "is_inference_mode_enabled"
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, functools._lru_cache_wrapper, functools.partial)
_READS = (("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD"))
_METHODS = ("__init__", "__call__", "forward", "backward")


class Code(NamedTuple):
    """The reads of the code of a forward. `names`: what is to be compared before each call. `modules`: by name, those that are no
    part of the model. `outside`: lines that read the environment, the clock or the inference mode. `owners`: functions and
    classes of the user's own, which may have attributes; `caches`: functions under ``functools.lru_cache``. `questions`: see
    `questions`."""

    names: tuple[NamedValue, ...]
    modules: Mapping[str, nn.Module]
    outside: tuple[str, ...]
    owners: tuple[Any, ...] = ()
    caches: tuple[Any, ...] = ()
    questions: frozenset[str] = frozenset()


def code_of(model: nn.Module, loss_fn: Any = None) -> Code:
    """Return what the code of the forward of a model reads, and of a loss function."""
    walk = _Walk(model)
    for kind in walk.classes:
        walk.add(_member(kind, "forward"))
    for module in model.modules():
        for value in vars(module).values():
            walk.add(value)
    walk.module("loss_fn", loss_fn) if isinstance(loss_fn, nn.Module) else walk.add(loss_fn)
    walk.run()
    outside = tuple(dict.fromkeys(walk.outside))
    names, owners, caches = tuple(walk.names.values()), tuple(walk.owners()), tuple(walk.caches)
    return Code(names, walk.modules, outside, owners, caches, frozenset(walk.questions))


class _Cell(NamedTuple):
    """The value of a closure, under any name."""

    cell: Any

    def get(self, name: str, default: Any, /) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cell.cell_contents


class _ClassValues(NamedTuple):
    """The attributes of a class."""

    kind: type

    def get(self, name: str, default: Any, /) -> Any:
        return vars(self.kind).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)


class _Mode(NamedTuple):
    """A mode of torch, under any name."""

    asked: Any
    set: Any

    def get(self, name: str, default: Any, /) -> Any:
        return self.asked()

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(value)


_GRADIENTS = _Mode(torch.is_grad_enabled, torch.set_grad_enabled)
_DETERMINISM = _Mode(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms)


class _Walk:
    """All functions that are reached, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.classes = list({type(module): None for module in model.modules()})
        self.names: dict[tuple[int, str], NamedValue] = {}
        self._kinds: dict[type, None] = {}
        self._followed = len(self.classes)
        self.caches: dict[Any, None] = {}
        self.modules: dict[str, nn.Module] = {}
        self._own = {id(module) for module in model.modules()}
        self.outside: list[str] = []
        self.questions: set[str] = set()
        self._reached: dict[int, FunctionType] = {}
        self._open: list[FunctionType] = []

    def add(self, value: Any) -> None:
        """A function, or what holds one, if it is the user's."""
        while True:
            if isinstance(value, (staticmethod, classmethod)) or inspect.ismethod(value):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            elif isinstance(value, functools.partial):
                value = value.func
            elif isinstance(value, functools._lru_cache_wrapper):
                self.caches[value] = None
                value = value.__wrapped__
            elif isinstance(value, type) and is_own(value):
                self._kinds[value] = None
                for name in _METHODS:
                    self.add(vars(value).get(name))
                return
            else:
                break
        kind = type(value)
        if kind not in self._kinds and not isinstance(value, (nn.Module, *_CODE)) and hasattr(value, "__dict__") and is_own(kind):
            self.add(kind)
            self.classes.append(kind)
        if isinstance(value, FunctionType) and id(value) not in self._reached:
            self._reached[id(value)] = value
            self._open.append(value)
            self.add(getattr(value, "__wrapped__", None))

    def owners(self) -> Iterator[Any]:
        """The classes and functions of the user's own that were reached."""
        kinds = {each: None for kind in (*self.classes, *self._kinds) for each in kind.__mro__}
        yield from (kind for kind in kinds if kind is not object and is_own(kind))
        yield from (each for each in self._reached.values() if not _is_library(each.__code__.co_filename))

    def module(self, place: str, module: nn.Module) -> None:
        """Add a module that is no part of the model, and the code of its forward."""
        if id(module) not in self._own:
            self.modules[place] = module
            for each in module.modules():
                self._own.add(id(each))
                self.add(_member(type(each), "forward"))

    def run(self) -> None:
        """Follow all names."""
        while self._open:
            self._follow()
            if len(self.classes) > self._followed:  # methods of these may be called by what was followed before
                self._followed = len(self.classes)
                self._open = list(self._reached.values())

    def _follow(self) -> None:
        while self._open:
            function = self._open.pop()
            own = not _is_library(function.__code__.co_filename)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                at = _Cell(cell)
                if own and name != "__class__":
                    self._value(name, at, name, ())
                elif isinstance(at.get(name, None), FunctionType):  # what a library's decorator holds
                    self.add(at.get(name, None))
            for code in _all_code(function.__code__) if own else ():
                self.questions |= questions_of(code)
                self._names(function, code)

    def _names(self, function: FunctionType, code: CodeType) -> None:
        for name in code.co_names:
            for kind in self.classes:
                self.add(_member(kind, name))
        # An attribute may be called like a global that the script sets in every step (`loss`).
        used = _used_names(code)
        words = used.attributes.union(used.globals_read)
        if words & _GRADIENT_NAMES:
            self.names[0, ""] = NamedValue("torch.is_grad_enabled()", _GRADIENTS, "")
        if _DETERMINISM.asked.__name__ in words:
            self.names[1, ""] = NamedValue("torch.are_deterministic_algorithms_enabled()", _DETERMINISM, "")
        if _INFERENCE_MODE in words:
            self.outside.append(f"{_line(code, _INFERENCE_MODE)} asks torch.{_INFERENCE_MODE}()")
        for name in used.globals_set:
            at = function.__globals__
            self.names.setdefault((id(at), name), NamedValue(f"{function.__module__}.{name}", at, name))
        for name in used.globals_read:
            if name in function.__globals__:
                self._value(name, function.__globals__, f"{function.__module__}.{name}", code.co_names)
                self._outside(name, function.__globals__[name], code)

    def _value(self, name: str, at: Any, place: str, used: tuple[str, ...]) -> None:
        value = at.get(name, None)
        if isinstance(value, ModuleType):
            for each in used if not _is_library(getattr(value, "__file__", None) or "<>") else ():
                if each in vars(value) and not isinstance(vars(value)[each], ModuleType):
                    self._value(each, vars(value), f"{value.__name__}.{each}", used)
        elif isinstance(value, type):
            self.add(value)
            for each in used if is_own(value) else ():
                if not self._settings(value, each):
                    self.add(vars(value).get(each))
        elif isinstance(value, nn.Module):
            self.module(place, value)
        elif _is_data(value):
            self.add(value)
            self.names[id(at.cell if isinstance(at, _Cell) else at), name] = NamedValue(place, at, name)
            for each in used if is_own(type(value)) else ():
                self._settings(type(value), each)
        else:
            self.add(value)

    def _settings(self, kind: type, name: str) -> bool:
        """Add what a class and its objects have under a name, if it is a plain value; return whether it is."""
        kinds = setting_classes(kind, name)
        for each in kinds:
            self.names[id(each), name] = NamedValue(f"{each.__module__}.{each.__qualname__}.{name}", _ClassValues(each), name)
        return bool(kinds)

    def _outside(self, name: str, value: Any, code: CodeType) -> None:
        """The environment, and the clock."""
        used = _used_names(code).attributes
        if any(value is each for each in _ENVIRONMENT) or (value is os and used & {"environ", "getenv"}):
            self.outside.append(f"{_line(code, name)} reads the environment")
        elif any(value is each for each in _CLOCKS) or (any(value is each for each in _CLOCK_OWNERS) and used & _CLOCK_NAMES):
            self.outside.append(f"{_line(code, name)} reads the clock")


def _member(kind: type, name: str) -> Any:
    """Return what a class has under a name, as it is there; None for nothing."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


class _UsedNames(NamedTuple):
    """The names that the instructions of some code read and set."""

    globals_read: tuple[str, ...]
    globals_set: tuple[str, ...]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=4096)  # each capture asks for the same code
def _used_names(code: CodeType) -> _UsedNames:
    names: dict[str, dict[str, None]] = {}
    for each in dis.get_instructions(code):
        names.setdefault(each.opname, {})[each.argval] = None
    read, attributes = ({**names.get(a, {}), **names.get(b, {})} for a, b in _READS)
    return _UsedNames(tuple(read), tuple(names.get("STORE_GLOBAL", ())), frozenset(attributes))


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all_code(each)


def _line(code: CodeType, name: str) -> str:
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        line = each.positions.lineno or line if each.positions is not None else line
        if each.argval == name:
            break
    return f"{code.co_filename}:{line}"


def _is_library(file: str) -> bool:
    return file.startswith(("<", _PRODUCT)) and "<ipython" not in file or any(part in file for part in _LIBRARIES)


def is_own(kind: type) -> bool:
    """Return whether a class is the user's own, and no library's."""
    functions = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    return not _is_library(functions[0].__code__.co_filename) if functions else kind.__module__ not in ("builtins", "torch")


def _is_data(value: Any) -> bool:
    """Return whether a value is what scripts keep settings in."""
    if isinstance(value, (*LEAVES, torch.Tensor)):
        return True
    if isinstance(value, (list, tuple, dict, set, frozenset, deque, SimpleNamespace, Namespace)):
        return True
    return is_dataclass(value) or (is_own(type(value)) and hasattr(value, "__dict__") and not isinstance(value, _CODE))
