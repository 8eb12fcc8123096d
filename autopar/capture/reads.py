"""Reads of a forward that are no arguments, recorded while it is traced: attributes of modules, and fields of objects in them.

What Python computes in the forward (a draw of `random`, ``self.n += 1``) happens once, at the capture; a program would repeat its
result for ever, so that is a CaptureError.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from autopar.capture.draws import DrawRecord, no_draws, place_of
from autopar.errors import CaptureError
from autopar.runtime.compat.hooks import replaced
from autopar.runtime.plain.frozen_reads import EVERY_FIELD, LEAVES, NamedValue, Reads, class_name

_NUMBERS = (bool, int, float, str)
_NO_SETTINGS = frozenset(("torch", "sympy", "numpy", "autopar", "builtins", "functools", "collections", "types"))
"""Packages whose objects are no settings; dynamo's own, which reads of it would change, are among them."""


@dataclass(eq=False)
class ReadRecord:
    """`read` and `written`: (class, attribute) of modules; `fields`: of plain objects in them. `numbers`: the value that was read
    first; `seen`: each (module, attribute) that was read, `reset`: those that the forward wrote before it read them. `counters`:
    by (path, attribute), numbers that the forward read and then replaced, with the last one and the line; `states`:
    tensors, and whether a list or dictionary in that attribute holds them."""

    read: set[tuple[str, str]] = field(default_factory=set)
    written: set[tuple[str, str]] = field(default_factory=set)
    fields: set[tuple[str, str]] = field(default_factory=set)
    numbers: dict[tuple[int, str], Any] = field(default_factory=dict)
    seen: set[tuple[int, str]] = field(default_factory=set)
    reset: set[tuple[int, str]] = field(default_factory=set)
    counters: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)
    states: dict[tuple[str, str], tuple[tuple[Tensor, ...], str, bool]] = field(default_factory=dict)
    draws: DrawRecord = field(default_factory=DrawRecord)

    @property
    def reads(self) -> Reads:
        return Reads(frozenset(self.read), frozenset(self.written), frozenset(self.fields))

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
    with _recording(own, {id(module): path for path, module in model.named_modules()}), no_draws(model, call, own.draws):
        result = call()
    for record in _recorded.get():
        record.add(own.reads)
    return result, own


def refuse_counters(trace: Callable[[Mapping[tuple[str, str], Any]], Any], records: list[ReadRecord]) -> None:
    """CaptureError where the forward changes a number that it reads, and changes it again when it begins with the new one (a
    cache does not). `trace` runs it with attributes of these values, by (path, name), and appends to `records`."""
    record = records[-1]
    if not record.counters:
        return
    trace({(path, name): value for (path, name), (value, _) in record.counters.items()})
    for (path, name), (value, line) in records[-1].counters.items():
        place = f"{path}.{name}" if path else name
        raise CaptureError(
            f"{line}: the forward counts in {place}, which would be {value!r} for ever in a program: make it a buffer "
            "(register_buffer), or pass it in with the batch"
        )


@contextmanager
def _recording(record: ReadRecord, paths: Mapping[int, str]) -> Iterator[None]:
    """While active, `record` gets what is read and written of modules."""
    usual = vars(nn.Module())
    kind: Any = nn.Module
    put = kind.__setattr__

    def write(module: nn.Module, name: str, value: Any) -> None:
        if name not in usual:
            record.written.add((class_name(module), name))
            if (id(module), name) not in record.seen:
                record.reset.add((id(module), name))
            before = record.numbers.get((id(module), name), value)
            counts, place = (id(module), name) not in record.reset, (paths.get(id(module), ""), name)
            if counts and type(value) in _NUMBERS and type(before) in _NUMBERS and value != before:
                record.counters[place] = (value, place_of(sys._getframe(1)))
            if id(module) in paths and not is_dynamo_compiling():
                record.states.pop(place, None)  # of what was set before, nothing is left
                if counts and (tensors := _tensors(value)) and module._buffers.get(name) is None:
                    record.states[place] = (tensors, place_of(sys._getframe(1)), False)
        put(module, name, value)

    def read(module: nn.Module, name: str) -> Any:
        if name in usual or name.startswith("__"):
            return object.__getattribute__(module, name)
        record.read.add((class_name(module), name))
        record.seen.add((id(module), name))
        traced = is_dynamo_compiling()  # this function, in branches and loops
        if not traced and id(module) not in known:
            known.add(id(module))
            _refuse_parameters(module)
        value = object.__getattribute__(module, name)
        if type(value) in _NUMBERS:
            record.numbers.setdefault((id(module), name), value)
        elif not record.draws.note(value):
            fields.watch(value)
            own = id(module) in paths and not traced
            place = (id(module), name)
            if own and isinstance(value, (list, dict, deque)) and place not in record.reset and place not in contents:
                contents[place] = (value, _tensors(value), place_of(sys._getframe(1)))
        return value

    known = set(paths)
    contents: dict[tuple[int, str], tuple[Any, tuple[Tensor, ...], str]] = {}
    with ExitStack() as stack:
        fields = _FieldReads(record, stack)
        with replaced(kind, "__getattribute__", _Reading(read)), replaced(kind, "__setattr__", write):
            yield
    for (module, name), (value, before, line) in contents.items():
        if more := tuple(each for each in _tensors(value) if not any(each is old for old in before)):
            record.states[paths[module], name] = (more, line, True)


def _refuse_parameters(module: nn.Module) -> None:
    """CaptureError where a module that is no part of the model, nor made by its forward, has parameters that take gradients."""
    own = (p for p in vars(module).get("_parameters", {}).values() if p is not None)
    if any(p.requires_grad and not p.is_meta and not isinstance(p, FakeTensor) for p in own):
        raise CaptureError(
            f"{place_of(sys._getframe(2))}: {type(module).__name__} is no part of the model, and nobody would train its "
            "parameters: make it an attribute of a module, or freeze it (requires_grad_(False))"
        )


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


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


def refuse_gradients(names: Sequence[NamedValue]) -> None:
    """CaptureError where a tensor that is a global or in a closure takes gradients."""
    for each in names:
        if isinstance(value := each.at.get(each.name, None), Tensor) and value.requires_grad and value.is_leaf:
            raise CaptureError(
                f"{each.place} takes a gradient and is no part of the model, so nobody would train it: make it a parameter of a "
                "module"
            )


@contextmanager
def numbers_unchanged(names: Sequence[NamedValue]) -> Iterator[None]:
    """CaptureError where captures inside change a number that is a global or in a closure."""
    before = [each.at.get(each.name, None) for each in names]
    yield
    for each, value in zip(names, before, strict=True):
        now = each.at.get(each.name, None)
        if type(value) in (int, float) and type(now) in (int, float) and now != value:
            raise CaptureError(
                f"the forward counts in {each.place}, which would be {now!r} for ever in a program: make it a buffer of a module "
                "(register_buffer), or pass it in with the batch"
            )
