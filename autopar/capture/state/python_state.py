"""The state of Python that a forward can change: attributes of modules, fields of objects, what is in lists and dictionaries, and
globals and closures that its code names.

A capture calls the forward, and leaves all of it as it was before. What the forward changed and may read in its next call is
found by calling it once more (`tracing.second_call`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import SymInt, Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.capture.state.reads import ReadRecord
from autopar.runtime.plain.code_reads import code_of, is_own
from autopar.runtime.plain.frozen_reads import LEAVES, NamedValue

_NUMBERS = (bool, int, float, str, SymInt)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_OWN_NAMES = frozenset(vars(nn.Module()))
_ABSENT = object()
Path = tuple[Any, ...]
"""The identity of a module or name, and the keys from there."""


@dataclass(frozen=True)
class Leaf:
    """A value that is no container. `place`: its name in messages, `within`: of what holds it; `put`: sets another one."""

    place: str
    within: str
    value: Any
    put: Callable[[Any], None]

    def same(self, other: Leaf | None) -> bool:
        """Return whether the other is of the same value; tensors, of the same object."""
        a, b = self.value, _ABSENT if other is None else other.value
        if isinstance(a, SymInt) and isinstance(b, SymInt):
            return bool(a.node.expr == b.node.expr)  # a comparison of the two would be a guard
        return a is b or (type(a) is type(b) and isinstance(a, (*_NUMBERS[:-1], bytes)) and a == b)

    @property
    def may_be_read(self) -> bool:
        """It is a number, or holds tensors."""
        return bool(self.tensors) or isinstance(self.value, (*_NUMBERS, bytes))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        inside = tree_leaves(self.value) if isinstance(self.value, (Tensor, tuple)) else ()
        return tuple(each for each in inside if isinstance(each, Tensor))


@dataclass(frozen=True)
class Change:
    """The place of a leaf that the forward changed. `line`: where, if that is known; `inside`: of an object, and no attribute of
    a module of the model."""

    path: Path
    line: str
    inside: bool


class PlainState:
    """The state that a forward of `model` and a loss can change."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.model, code = model, code_of(model, loss_fn)
        self.caches = code.caches
        modules = {path: module for path, module in model.named_modules()}
        for place, outside in code.modules.items():
            modules |= {f"{place}.{path}".rstrip("."): module for path, module in outside.named_modules()}
        self.roots: list[tuple[str, Any]] = list(modules.items())
        owner = getattr(loss_fn, "__self__", loss_fn)
        if not isinstance(owner, nn.Module):
            self.roots.append(("loss_fn", owner))
        self.roots += [(each.place, each) for each in (*code.names, *code.shared)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All of it is as before at the end."""
        before = [(holder, _copied(holder)) for _, _, holder in self._holders()]
        misses = [each.cache_info().misses for each in self.caches]
        try:
            yield
        finally:
            for holder, content in before:
                _restore(holder, content)
            for cache, count in zip(self.caches, misses, strict=True):
                if cache.cache_info().misses != count:  # it would give fake tensors to the model's own calls
                    cache.cache_clear()

    def leaves(self) -> dict[Path, Leaf]:
        """Return the values of now."""
        out: dict[Path, Leaf] = {}
        for path, place, holder in self._holders():
            for key, value in _contents(holder).items():
                if isinstance(value, (Tensor, tuple, bytes, *_NUMBERS, type(None))):
                    out[*path, key] = Leaf(_place(place, holder, key), place, value, _Put(holder, key))
        return out

    def changes(self, before: Mapping[Path, Leaf], record: ReadRecord) -> tuple[Change, ...]:
        """Return what the forward has changed since `before`, but for attributes that it sets before it reads them."""
        own = {id(module) for module in self.model.modules()}
        leaves = ((path, leaf) for path, leaf in self.leaves().items() if path[:2] not in record.reset)
        changes = (path for path, leaf in leaves if leaf.may_be_read and not leaf.same(before.get(path)))
        return tuple(Change(path, record.lines.get(path[:2], ""), len(path) > 2 or path[0] not in own) for path in changes)

    def _holders(self) -> Iterator[tuple[Path, str, Any]]:
        """The containers that are reached, each once: path, place, container."""
        seen = set[int]()
        todo: list[tuple[Path, str, Any]] = [((id(root),), place, root) for place, root in reversed(self.roots)]
        while todo:
            path, place, holder = todo.pop()
            if id(holder) in seen or not _is_holder(holder):
                continue
            seen.add(id(holder))
            yield path, place, holder
            inside = ((key, value) for key, value in _contents(holder).items() if not isinstance(value, (*LEAVES, Tensor)))
            todo += [((*path, key), _place(place, holder, key), value) for key, value in reversed(list(inside))]


def _is_holder(value: Any) -> bool:
    if isinstance(value, (nn.Module, NamedValue, list, dict, deque, set)) or _is_array(value):
        return True
    # other threads may change what is in objects of libraries (a progress bar), and would not want them restored
    return not isinstance(value, (*LEAVES, *_CODE, Tensor)) and is_own(type(value)) and hasattr(value, "__dict__")


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _contents(holder: Any) -> Mapping[Any, Any]:
    """The values by key."""
    if isinstance(holder, nn.Module):
        return {**{name: value for name, value in vars(holder).items() if name not in _OWN_NAMES}, **holder._buffers}
    if isinstance(holder, NamedValue):
        value = holder.at.get(holder.name, _ABSENT)
        return {} if value is _ABSENT else {holder.name: value}
    if isinstance(holder, dict):
        return dict.copy(holder)
    if isinstance(holder, (list, deque)):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return {each: each for each in holder}
    if _is_array(holder):
        return {"values": b"%s %s %s" % (str(holder.dtype).encode(), str(holder.shape).encode(), holder.tobytes())}
    return dict(vars(holder))


def _place(place: str, holder: Any, key: Any) -> str:
    if isinstance(holder, NamedValue) or _is_array(holder):
        return place
    inside = isinstance(holder, (dict, list, deque, set))
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
        elif isinstance(holder, (dict, list, deque)):
            holder[key] = value
        else:
            vars(holder)[key] = value


def _copied(holder: Any) -> Any:
    return holder.copy() if _is_array(holder) else list(holder) if isinstance(holder, (list, deque)) else _contents(holder)


def _restore(holder: Any, content: Any) -> None:
    if _is_array(holder):
        with suppress(ValueError):  # one that cannot be written has no other values
            holder[...] = content
    elif isinstance(holder, (list, deque)):
        if len(holder) != len(content) or any(a is not b for a, b in zip(holder, content, strict=True)):
            holder.clear()
            holder.extend(content)
    elif isinstance(holder, set):
        if holder != set(content):
            holder.clear()
            holder.update(content)
    else:
        now = _contents(holder)
        for key in now.keys() - content.keys():
            homes = (holder,) if isinstance(holder, dict) else (vars(holder), getattr(holder, "_buffers", {}))
            next(home for home in homes if key in home).pop(key)
        for key, value in content.items():
            if now.get(key, _ABSENT) is not value:
                _Put(holder, key)(value)
