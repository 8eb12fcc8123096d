"""The state of Python that a forward can change: attributes of modules, fields of objects, what is in lists and dictionaries, and
globals, closures, classes and functions that its code reaches.

A capture calls the forward, and leaves all of it as it was before. What the forward changed and may read in its next call is
found by calling it once more (`second_call`)."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from autopar.capture.state.reads import ReadRecord
from autopar.runtime.plain.code_reads import code_of, is_own
from autopar.runtime.plain.frozen_reads import LEAVES, MOST_LEAVES, NamedValue

_SYMBOLS = (SymInt, SymFloat, SymBool)
_VALUES = (bool, int, float, str, bytes, enum.Enum)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_LEAVES = (*LEAVES, *_SYMBOLS, *_CODE, Tensor)
_OWN_NAMES = frozenset(vars(nn.Module()))
_HOOKS = frozenset(name for name in _OWN_NAMES if name.startswith("_forward") and "hooks" in name)
_MOST_ARRAY_BYTES = 2**24
Path = tuple[Any, ...]
"""The identity of a module or name, and the keys from there."""


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass(frozen=True)
class Leaf:
    """A value that is no container. `place`: its name in messages, `within`: of what holds it; `put`: sets another one."""

    place: str
    within: str
    value: Any
    put: Callable[[Any], None]

    def same(self, other: Leaf | None) -> bool:
        """Return whether the other is of the same value; tensors, of the same object."""
        a, b = self.value, ABSENT if other is None else other.value
        if isinstance(a, _SYMBOLS) and isinstance(b, _SYMBOLS):
            return bool(a.node.expr == b.node.expr)  # a comparison of the two would be a guard
        return a is b or (type(a) is type(b) and isinstance(a, _VALUES) and a == b)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        inside = tree_leaves(self.value) if isinstance(self.value, (Tensor, tuple)) else ()
        return tuple(each for each in inside if isinstance(each, Tensor))


@dataclass(frozen=True)
class Change:
    """The place of a leaf that the forward changed, set or took away. `line`: where, if that is known; `inside`: of an object,
    and no attribute of a module of the model; `reset`: an attribute that the forward set before it read it."""

    path: Path
    line: str
    inside: bool
    reset: bool


class PlainState:
    """The state that a forward of `model`, a copy, and a loss can change."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.model, code = model, code_of(model, loss_fn)
        self.caches = code.caches
        own = dict(model.named_modules())
        self._own = {id(module) for module in own.values()}
        others: list[tuple[str, Any]] = []
        for place, outside in code.modules.items():
            others += [(f"{place}.{path}".rstrip("."), module) for path, module in outside.named_modules()]
        owner = getattr(loss_fn, "__self__", loss_fn)
        if isinstance(owner, functools.partial):
            others += [("loss_fn", list(owner.args)), ("loss_fn", owner.keywords)]
        elif not isinstance(owner, (nn.Module, *_CODE)):
            others.append(("loss_fn", owner))
        others += [(each.place, each) for each in code.names]
        others += [(each.__qualname__, each) for each in code.owners]
        self._roots = [
            *((place, module, True) for place, module in own.items()),
            *((place, each, False) for place, each in others),
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All of it is as before at the end."""
        before = [(holder, private, _copied(holder)) for _, _, holder, private in self._holders()]
        misses = [each.cache_info().misses for each in self.caches]
        try:
            yield
        finally:
            for holder, private, content in before:
                _restore(holder, content, private)
            for cache, count in zip(self.caches, misses, strict=True):
                if cache.cache_info().misses != count:  # it would give fake tensors to the model's own calls
                    cache.cache_clear()

    def leaves(self) -> dict[Path, Leaf]:
        """Return the values of now."""
        out: dict[Path, Leaf] = {}
        for path, place, holder, _ in self._holders():
            for key, value in _contents(holder).items():
                if _is_leaf(value):
                    out[*path, _identity(key)] = Leaf(_place(place, holder, key), place, value, _Put(holder, key))
        return out

    def changes(self, before: Mapping[Path, Leaf], record: ReadRecord) -> tuple[Change, ...]:
        """Return what the forward has changed since `before`."""
        after = self.leaves()
        paths = dict.fromkeys((*before, *after))
        changed = (path for path in paths if not (after.get(path) or before[path]).same(before.get(path)) or path not in after)
        return tuple(
            Change(path, record.lines.get(path[:2], ""), len(path) > 2 or path[0] not in self._own, record.is_reset(path[:2]))
            for path in changed
            if path in before or after[path].value is not None
        )

    def _holders(self) -> Iterator[tuple[Path, str, Any, bool]]:
        """The containers that are reached, each once: path, place, container, and whether it is of the copy of the model."""
        seen = set[int]()
        todo: list[tuple[Path, str, Any, bool]] = [((id(root),), place, root, own) for place, root, own in reversed(self._roots)]
        while todo:
            path, place, holder, private = todo.pop()
            if id(holder) in seen or not _is_holder(holder, private):
                continue
            seen.add(id(holder))
            yield path, place, holder, private
            inside = [(key, value) for key, value in _contents(holder).items() if not isinstance(value, _LEAVES)]
            todo += [((*path, _identity(key)), _place(place, holder, key), value, private) for key, value in reversed(inside)]


def _is_leaf(value: Any) -> bool:
    if isinstance(value, tuple):
        inside = tree_leaves(value, is_leaf=lambda each: not isinstance(each, tuple))
        return any(isinstance(each, Tensor) for each in inside) and not any(_is_holder(each, private=True) for each in inside)
    return isinstance(value, (Tensor, type, FunctionType, BuiltinFunctionType, type(None), *_SYMBOLS, *_VALUES))


def _is_holder(value: Any, private: bool) -> bool:
    if isinstance(value, (nn.Module, NamedValue, list, tuple, dict, deque, set)) or _is_array(value):
        return True
    if isinstance(value, (type, FunctionType)):
        return not private and (isinstance(value, FunctionType) or is_own(value))
    # other threads may change what is in objects of libraries (a progress bar), and would not want them restored
    has_fields = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return not isinstance(value, _LEAVES) and (private or is_own(type(value))) and has_fields


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" and value.nbytes <= _MOST_ARRAY_BYTES


def _contents(holder: Any) -> Mapping[Any, Any]:
    """The values by key. Of very many only their number is seen."""
    many = isinstance(holder, (list, tuple, deque, set, dict)) and len(holder) > MOST_LEAVES
    return {"number": len(holder)} if many else _whole_contents(holder)


def _whole_contents(holder: Any) -> Mapping[Any, Any]:
    if isinstance(holder, nn.Module):
        own = {name: value for name, value in vars(holder).items() if name not in _OWN_NAMES or name in _HOOKS}
        return {**own, **holder._buffers}
    if isinstance(holder, NamedValue):
        value = holder.at.get(holder.name, ABSENT)
        return {} if value is ABSENT else {holder.name: value}
    if isinstance(holder, dict):
        return dict(dict.items(holder))
    if isinstance(holder, tuple):
        return {index: value for index, value in enumerate(holder) if not _is_leaf(value)}
    if isinstance(holder, (list, deque)):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return {each: each for each in holder}
    if _is_array(holder):
        return {"values": b"%s %s %s" % (str(holder.dtype).encode(), str(holder.shape).encode(), holder.tobytes())}
    if isinstance(holder, type):
        return {name: value for name, value in vars(holder).items() if not name.startswith("__") and not isinstance(value, _CODE)}
    if isinstance(holder, FunctionType):
        defaults = {"__defaults__": holder.__defaults__, "__kwdefaults__": holder.__kwdefaults__}
        return {**vars(holder), **{name: value for name, value in defaults.items() if value is not None}}
    slots = (name for kind in type(holder).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    return {**getattr(holder, "__dict__", {}), **{name: getattr(holder, name) for name in slots if hasattr(holder, name)}}


def _names(slots: Any) -> tuple[str, ...]:
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _identity(key: Any) -> Any:
    return key if isinstance(key, (*_VALUES, type(None))) else id(key)


def _place(place: str, holder: Any, key: Any) -> str:
    if isinstance(holder, (NamedValue, set)) or _is_array(holder):
        return place
    inside = isinstance(holder, (dict, list, tuple, deque))
    return f"{place}[{key!r}]" if inside else f"{place}.{key}".lstrip(".")


@dataclass(frozen=True)
class _Put:
    """Sets the value of a key of a container."""

    holder: Any
    key: Any

    def __call__(self, value: Any) -> None:
        holder, key = self.holder, self.key
        if isinstance(holder, NamedValue):
            holder.put(value)
        elif isinstance(holder, nn.Module) and key in holder._buffers:
            holder._buffers[key] = value
        elif isinstance(holder, dict):
            _plain(holder).__setitem__(holder, key, value)
        elif isinstance(holder, (list, deque)):
            holder[key] = value
        elif isinstance(holder, set):
            holder.discard(key)
            holder.add(value)
        elif isinstance(holder, type):
            setattr(holder, key, value)
        else:
            object.__setattr__(holder, key, value)

    def remove(self) -> None:
        """Take the key away."""
        holder, key = self.holder, self.key
        if isinstance(holder, NamedValue):
            del holder.at[holder.name]  # type: ignore[attr-defined]
        elif isinstance(holder, nn.Module):
            next(home for home in (vars(holder), holder._buffers) if key in home).pop(key)
        elif isinstance(holder, dict):
            _plain(holder).pop(holder, key)
        elif isinstance(holder, type):
            delattr(holder, key)
        else:
            object.__delattr__(holder, key)


def _plain(holder: dict[Any, Any]) -> Any:
    """The class whose methods do what those of its subclasses may forbid."""
    return OrderedDict if isinstance(holder, OrderedDict) else dict


def _copied(holder: Any) -> Any:
    return holder.copy() if _is_array(holder) else list(holder) if isinstance(holder, (list, deque)) else _whole_contents(holder)


def _restore(holder: Any, content: Any, private: bool) -> None:
    """Give a container its content. Of one that others may see, what is no value of the capture stays: another thread may have
    put it there."""
    if _is_array(holder):
        with suppress(ValueError):  # one that cannot be written has no other values
            holder[...] = content
    elif isinstance(holder, (list, deque)):
        new = [each for each in list(holder)[len(content) :] if not private and not _has_fakes(each)]
        if len(holder) != len(content) + len(new) or any(a is not b for a, b in zip(holder, content, strict=False)):
            holder.clear()
            holder.extend([*content, *new])
    elif isinstance(holder, set):
        for each in [each for each in holder if each not in content and (private or _has_fakes(each))]:
            holder.discard(each)
        holder.update(content.values())
    elif isinstance(holder, NamedValue) or not isinstance(holder, tuple):
        now = _whole_contents(holder)
        for key in now.keys() - content.keys():
            if private or isinstance(holder, (type, NamedValue)) or _has_fakes(now[key]):
                _Put(holder, key).remove()
        for key, value in content.items():
            if now.get(key, ABSENT) is not value:
                _Put(holder, key)(value)


def _has_fakes(value: Any) -> bool:
    """Return whether a value is or holds a tensor of the capture, or a symbol."""
    seen, todo = set[int](), [value]
    while todo:
        each = todo.pop()
        if isinstance(each, (FakeTensor, *_SYMBOLS)):
            return True
        if id(each) not in seen and _is_holder(each, private=False):
            seen.add(id(each))
            todo += tuple(each) if isinstance(each, tuple) else _contents(each).values()
    return False
