"""Reads of a forward that are no arguments, recorded while it is traced: attributes of modules, and fields of objects in them.

What Python computes in the forward (a draw of `random`, ``self.n += 1``) happens once, at the capture; a program would repeat its
result for ever, so that is a CaptureError.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling

from autopar.capture.state.draws import DrawRecord, no_draws, place_of
from autopar.capture.tracing.places import is_users
from autopar.errors import CaptureError
from autopar.runtime.compat.hooks import replaced
from autopar.runtime.plain.frozen_reads import EVERY_FIELD, LEAVES, Reads, class_name

_NUMBERS = (bool, int, float, str)
_NO_SETTINGS = frozenset(("torch", "sympy", "numpy", "autopar", "builtins", "functools", "collections", "types"))
"""Packages whose objects are no settings; dynamo's own, which reads of it would change, are among them."""


@dataclass(eq=False)
class ReadRecord:
    """`read` and `written`: (class, attribute) of modules; `fields`: of plain objects in them. `seen`: each (module, attribute)
    that was read, `reset`: those that the forward wrote before it read them, `lines`: where they were written last, or where a
    list or dictionary in them was read first; `opened`: modules whose ``__dict__`` the user's code takes."""

    read: set[tuple[str, str]] = field(default_factory=set)
    written: set[tuple[str, str]] = field(default_factory=set)
    fields: set[tuple[str, str]] = field(default_factory=set)
    seen: set[tuple[int, str]] = field(default_factory=set)
    reset: set[tuple[int, str]] = field(default_factory=set)
    lines: dict[tuple[int, str], str] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    draws: DrawRecord = field(default_factory=DrawRecord)

    @property
    def reads(self) -> Reads:
        return Reads(frozenset(self.read), frozenset(self.written), frozenset(self.fields))

    def is_reset(self, path: tuple[Any, ...]) -> bool:
        """Return whether the forward sets an attribute, by module and name, before it reads it."""
        return path in self.reset and path[0] not in self.opened

    def add(self, reads: Reads) -> None:
        self.read |= reads.attributes
        self.written |= reads.writes
        self.fields |= reads.fields


_recorded: ContextVar[tuple[ReadRecord, ...]] = ContextVar("records of what captures read", default=())


@contextmanager
def recorded_reads() -> Iterator[ReadRecord]:
    """The record of what every capture inside reads."""
    record = ReadRecord()
    token = _recorded.set((*_recorded.get(), record))
    try:
        yield record
    finally:
        _recorded.reset(token)


def call_recorded(model: nn.Module, call: Callable[[], Any]) -> tuple[Any, ReadRecord]:
    """Return the result of the model's forward, and what it read. CaptureError where it draws from a random generator of Python
    or numpy, or calls a module that is no part of the model and takes gradients."""
    own = ReadRecord()
    with _recording(own, model), no_draws(model, call, own.draws):
        result = call()
    for record in _recorded.get():
        record.add(own.reads)
    return result, own


@contextmanager
def _recording(record: ReadRecord, model: nn.Module) -> Iterator[None]:
    """While active, `record` gets what is read and written of modules."""
    usual = vars(nn.Module())
    kind: Any = nn.Module
    put = kind.__setattr__

    def write(module: nn.Module, name: str, value: Any) -> None:
        if name not in usual:
            record.written.add((class_name(module), name))
            if (id(module), name) not in record.seen:
                record.reset.add((id(module), name))
            elif not is_dynamo_compiling():  # this function, in branches and loops
                record.lines[id(module), name] = place_of(sys._getframe(1))
        put(module, name, value)

    def read(module: nn.Module, name: str) -> Any:
        if name == "__dict__" and is_users(sys._getframe(1).f_code.co_filename):
            record.opened.add(id(module))
        if name in usual or name.startswith("__"):
            return object.__getattribute__(module, name)
        record.read.add((class_name(module), name))
        record.seen.add((id(module), name))
        if not is_dynamo_compiling() and id(module) not in known:
            known.add(id(module))
            _refuse_parameters(module)
        value = object.__getattribute__(module, name)
        if not isinstance(value, _NUMBERS) and not record.draws.note(value):
            fields.watch(value)
            place = (id(module), name)
            if isinstance(value, (list, dict, deque)) and place not in record.lines and not is_dynamo_compiling():
                record.lines[place] = place_of(sys._getframe(1))
        return value

    known = {id(module) for module in model.modules()}
    with ExitStack() as stack:
        fields = _FieldReads(record, stack)
        with replaced(kind, "__getattribute__", _Reading(read)), replaced(kind, "__setattr__", write):
            yield


def _refuse_parameters(module: nn.Module) -> None:
    """CaptureError where a module that is no part of the model, nor made by its forward, has parameters that take gradients."""
    own = (p for p in vars(module).get("_parameters", {}).values() if p is not None)
    if any(p.requires_grad and not p.is_meta and not isinstance(p, FakeTensor) for p in own):
        raise CaptureError(
            f"{place_of(sys._getframe(2))}: {type(module).__name__} is no part of the model, and nobody would train its "
            "parameters: make it an attribute of a module, or freeze it (requires_grad_(False))"
        )


class _Reading:
    """``__getattribute__`` of a class. It is no function, since dynamo (the branches of torch.cond) refuses classes with one."""

    def __init__(self, read: Callable[[Any, str], Any]) -> None:
        self.read = read

    def __get__(self, owner: Any, kind: Any) -> Callable[..., Any]:
        return self.read if owner is None else partial(self.read, owner)  # dynamo asks the class for it


class _FieldReads:
    """Records which fields of plain objects are read, once they were read of a module: transformers writes others into its
    settings when it saves, on one rank. The classes are as they were when `stack` ends."""

    def __init__(self, record: ReadRecord, stack: ExitStack) -> None:
        self.record, self.stack = record, stack
        self.classes: set[type] = set()

    def watch(self, value: Any) -> None:
        """Records reads of the class of an object, or of those in a list or dictionary."""
        if isinstance(value, (list, tuple, dict)):
            for each in value.values() if isinstance(value, dict) else value:
                if not isinstance(each, (*LEAVES, list, tuple, dict)):
                    self.watch(each)
            return
        kind: Any = type(value)
        if kind in self.classes or isinstance(value, (type, nn.Module)) or kind.__module__.partition(".")[0] in _NO_SETTINGS:
            return
        if not hasattr(value, "__dict__"):
            return
        with suppress(TypeError):  # a built-in class: all of its fields count
            reading = _Reading(partial(self.read, kind.__getattribute__))
            self.stack.enter_context(replaced(kind, "__getattribute__", reading))
            self.classes.add(kind)
            self.record.fields.add((class_name(value), ""))

    def note(self, value: Any, name: str, found: Any) -> None:
        """A field was read, under its name or another one (a property, `attribute_map` of transformers)."""
        own = object.__getattribute__(value, "__dict__")
        names = {EVERY_FIELD} if name == "__dict__" else {name} if not name.startswith("__") else set[str]()
        if name not in own and isinstance(found, LEAVES):
            names |= {each for each, held in own.items() if held is found}
        self.record.fields |= {(class_name(value), each) for each in names}

    def read(self, usual: Callable[[Any, str], Any], value: Any, name: str) -> Any:
        try:
            content = usual(value, name)
        except AttributeError:
            self.note(value, name, _Reading)  # of which no field has the value
            raise
        self.note(value, name, content)
        if not isinstance(content, LEAVES):
            self.watch(content)
        return content
