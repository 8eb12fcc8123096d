"""Reads of captured programs that are no arguments: attributes of modules and what is in them, globals, closures.

A program has the values of its capture. `FrozenReads.changed` says, before each call, which values are others now; they are
part of the key that selects a program (`call_keys.CallKey`), so that another value is another program, and one that comes back
finds the earlier program.
"""

from __future__ import annotations

import enum
import hashlib
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

MOST_LEAVES = 2000
"""An object with more values than this in it is compared by its identity."""
_DEEPEST = 5
LEAVES = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_SETTINGS = (*LEAVES, list, tuple, dict, torch.Tensor)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module)
_MISSING = object()

EVERY_FIELD = "*"
Fields = Mapping[str, set[str]]

Change = tuple[str, str]
"""The place of a value (``layers.0.alpha``), and what it is, in words."""


class Reads(NamedTuple):
    """The reads and writes of one capture in modules: (class, attribute), since of equal layers only one is traced.
    `fields`: what it read of the plain objects that are their attributes (settings); of other classes everything counts."""

    attributes: frozenset[tuple[str, str]] = frozenset()
    writes: frozenset[tuple[str, str]] = frozenset()
    fields: frozenset[tuple[str, str]] = frozenset()

    def fields_by_class(self) -> dict[str, set[str]]:
        """The fields that were read, by the full name of their class."""
        out: dict[str, set[str]] = {}
        for kind, name in self.fields:
            out.setdefault(kind, set()).add(name)
        return out


class Values(Protocol):
    """Values by name: the dictionary of an object or a module, a closure."""

    def get(self, name: str, default: Any, /) -> Any: ...


class NamedValue(NamedTuple):
    """The value of a name, and what it is called in messages."""

    place: str
    at: Values
    name: str

    def put(self, value: Any) -> None:
        """Give the name another value."""
        self.at[self.name] = value  # type: ignore[index]


def class_name(value: Any) -> str:
    """The full name of the class of a module or object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def setting_classes(kind: type, name: str) -> tuple[type, ...]:
    """Return the class from which a class and its objects have a plain value, after those that may get one of their own."""
    kinds = kind.__mro__
    last = next((index for index, each in enumerate(kinds) if name in vars(each)), None)
    return kinds[: last + 1] if last is not None and isinstance(vars(kinds[last])[name], _SETTINGS) else ()


class FrozenReads:
    """The values that the programs of `model`, a skeleton without data, have read. `names`: globals and closures of its code.
    `others`: modules by name that are no part of the model, tensors included (a loss). `initial`: those of another model of the
    same programs (a copy). `questions`: those of its code (`questions`)."""

    def __init__(
        self,
        model: nn.Module,
        reads: Reads,
        names: Iterable[NamedValue] = (),
        others: Mapping[str, nn.Module] = MappingProxyType({}),
        initial: Mapping[str, str] | None = None,
        questions: frozenset[str] = frozenset(),
    ) -> None:
        self.questions = questions
        self.model, self.reads, self.names, self.others = model, Reads(), tuple(names), others
        self.initial: dict[str, str] = {}
        self._values: tuple[NamedValue, ...] = ()
        self._family: weakref.WeakSet[FrozenReads] = weakref.WeakSet((self,))
        self._take(reads)
        if initial is not None:
            self.initial = dict(initial)
            self._compare()

    def add(self, reads: Reads) -> None:
        """Add the reads of a further program, with the values of now, at which it was captured."""
        both = Reads(*(before | more for before, more in zip(self.reads, reads, strict=True)))
        for each in self._family if both != self.reads else ():
            each._take(both)

    def copied(self, model: nn.Module) -> FrozenReads:
        """The same reads of a copy of the model."""
        out = FrozenReads(model, self.reads, self.names, self.others, self.initial, self.questions)
        self._family.add(out)
        out._family = self._family
        return out

    def _take(self, reads: Reads) -> None:
        self.reads = reads
        absent = {value.place for value in self._values} - self.initial.keys()  # set since then, where a class has the first
        self._values = (*self._attributes(), *self.names)
        self._look()
        self.initial = {place: text for place, text in self._now.items() if not _is_inside(place, absent)} | self.initial
        self._compare()

    def changed(self) -> tuple[Change, ...]:
        """The values that are not those of the first programs."""
        now = [get(name, _MISSING) for get, name in self._getters]
        same = all(map(is_, now, self._seen))
        if not same or any(list(leaves(place, value, fields)) != before for place, value, fields, before in self._contents):
            self._look()
            self._compare()
        return self._changed

    def is_written(self, module: nn.Module, name: str) -> bool:
        """Return whether the forward sets this attribute, which a program does not."""
        return (class_name(module), name) in self.reads.writes

    def _attributes(self) -> Iterator[NamedValue]:
        for place, module, name in read_attributes(self.model.named_modules(), self.reads):
            yield NamedValue(place, vars(module), name)
            for kind in setting_classes(type(module), name):
                yield NamedValue(f"{kind.__qualname__}.{name}", vars(kind), name)
        for prefix, other in self.others.items():
            modules = dict(other.named_modules(prefix=prefix))
            for place, module, name in read_attributes(modules.items(), self.reads):
                yield NamedValue(place, vars(module), name)
            for path, module in modules.items():
                for tensors in (module._parameters, module._buffers):
                    yield from (NamedValue(f"{path}.{name}", tensors, name) for name in tensors)

    def _look(self) -> None:
        """Take down all values; objects that several modules have, once."""
        self._getters = [(at.get, name) for _, at, name in self._values]
        self._seen: list[Any] = [get(name, _MISSING) for get, name in self._getters]
        self._contents: list[tuple[str, Any, Fields, list[tuple[str, Any]]]] = []
        self._now: dict[str, str] = {}
        inside: set[tuple[int, bool]] = set()
        own, first_name = self.reads.fields_by_class(), len(self._values) - len(self.names)
        for index, ((place, _, _), value) in enumerate(zip(self._values, self._seen, strict=True)):
            fields = own if index < first_name else {}  # of globals and closures no field is known to be unread
            if value is _MISSING:
                continue
            if isinstance(value, (*LEAVES, *_CODE)):
                self._now[place] = _text(value)
            elif (id(value), not fields) not in inside:
                inside.add((id(value), not fields))
                content = list(leaves(place, value, fields))
                self._contents.append((place, value, fields, content))
                self._now.update((where, _text(leaf)) for where, leaf in content)

    def _compare(self) -> None:
        before, now = self.initial, self._now
        self._changed = tuple((place, text) for place, text in sorted(now.items()) if before.get(place) != text)
        self._changed += tuple((place, "") for place in sorted(before.keys() - now.keys()))


def _is_inside(place: str, places: Collection[str]) -> bool:
    """Return whether a value is at one of the places, or in the object that is there."""
    ends = (match.start() for match in re.finditer(r"[.\[]|$", place))
    return any(place[:end] in places for end in ends)


def read_attributes(modules: Iterable[tuple[str, nn.Module]], reads: Reads) -> Iterator[tuple[str, nn.Module, str]]:
    """The attributes of modules (by path) that were read, and are no tensors or modules: place, module and name."""
    by_class: dict[str, list[str]] = {}
    for kind, name in sorted(reads.attributes):
        by_class.setdefault(kind, []).append(name)
    for path, module in modules:
        tensors = (module._parameters, module._buffers, module._modules)
        for name in by_class.get(class_name(module), ()):
            if name not in vars(nn.Module) and not any(name in each for each in tensors):
                yield f"{path}.{name}" if path else name, module, name


def leaves(place: str, value: Any, fields: Fields = MappingProxyType({})) -> Iterator[tuple[str, Any]]:
    """The plain values in an object, by place, and what stands for its tensors; of a very large one its identity. Of the classes
    in `fields` only these fields."""
    values = []
    for each in _inside(place, value, 0, fields):
        values.append(each)
        if len(values) > MOST_LEAVES:
            return iter([(place, id(value))])
    return iter(values)


def _inside(place: str, value: Any, depth: int, fields: Fields) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (*LEAVES, *_CODE)):
        yield place, value
    elif isinstance(value, torch.Tensor):
        yield place, _TensorValue(value)
    elif depth >= _DEEPEST:
        yield place, type(value).__qualname__
    elif isinstance(value, dict):
        yield place, len(value)
        for key, each in value.items():
            yield from _inside(f"{place}[{key!r}]", each, depth + 1, fields)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield place, len(value)
        for index, each in enumerate(value):
            yield from _inside(f"{place}[{index}]", each, depth + 1, fields)
    else:
        yield place, type(value).__qualname__
        names, own = fields.get(class_name(value), {EVERY_FIELD}), getattr(value, "__dict__", {})
        for name, each in own.items():
            if name in names or EVERY_FIELD in names:
                yield from _inside(f"{place}.{name}", each, depth + 1, fields)
        for name in sorted(names - own.keys()):
            for kind in setting_classes(type(value), name)[-1:]:
                yield from _inside(f"{place}.{name}", vars(kind)[name], depth + 1, fields)


class _TensorValue:
    """A tensor as it is now: equal to another of the same object that nobody has written into since."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorValue) and (self.tensor is other.tensor) and self.version == other.version

    __hash__ = None  # type: ignore[assignment]

    def text(self) -> str:
        tensor = self.tensor.detach()
        words = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        if tensor.is_meta or type(tensor) is not torch.Tensor:
            return words
        data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else b""
        return f"{words} {_digest(data)}"


def _text(value: Any) -> str:
    if isinstance(value, _TensorValue):
        return value.text()
    if isinstance(value, nn.Module):
        return class_name(value)
    if isinstance(value, _CODE):
        code = getattr(value, "__code__", None)
        line = f" at line {code.co_firstlineno}" if code is not None else ""
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}{line}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:30]}... {_digest(text.encode())}"


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
