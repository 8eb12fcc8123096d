"""What of the plain model is watched without a reference that keeps it: samples of its tensors' values, which edits of ``.data``
change and no version counts, and the attributes that programs have read."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import nn

from .frozen_reads import LEAVES, Fields, FrozenReads, Reads, leaves, read_attributes

_WINDOW_BYTES = 256
_MISSING = object()


class ValueSample:
    """A few hundred bytes of a tensor in host memory, from begin, middle and end. `taken` is empty for other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        count = tensor.numel() * tensor.element_size()
        readable = type(tensor.data) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and count
        size = min(count, _WINDOW_BYTES)
        offsets = sorted({0, (count - size) // 2, count - size}) if readable else ()
        window: Any = ctypes.c_char * size
        self._windows = [window.from_address(tensor.data_ptr() + offset) for offset in offsets]
        self.taken = self.now()

    def now(self) -> list[bytes]:
        """The bytes as they are. Only while the tensor is there, at the same address."""
        return [each.raw for each in self._windows]


class PlainAttributes:
    """The attributes of the plain model that programs read, which are not seen there once the parallel model has its own."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, weakref.ref(module)) for path, module in model.named_modules()]
        self._reads: Reads | None = None
        self._fields: Fields = {}
        self._before: dict[str, tuple[weakref.ref[nn.Module], str, Any]] = {}

    def changed(self, frozen: FrozenReads) -> str:
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
        """Takes down the values of attributes that are read for the first time."""
        self._reads, self._fields = frozen.reads, frozen.reads.fields_by_class()
        modules = [(path, module) for path, each in self._modules if (module := each()) is not None]
        contents: dict[int, _Content] = {}
        for place, module, name in read_attributes(modules, frozen.reads):
            value = vars(module).get(name, _MISSING)
            if place not in self._before and name != "training" and not frozen.is_written(module, name):
                if not isinstance(value, LEAVES):
                    value = contents.setdefault(id(value), _Content(value, {}))
                self._before[place] = weakref.ref(module), name, value


class _Content(list[tuple[str, Any]]):
    """The plain values in an object, which is not kept. None of code and tensors, which would be."""

    def __init__(self, value: Any, fields: Fields) -> None:
        found = leaves("", value, fields) if value is not _MISSING else ()
        super().__init__((where, each if isinstance(each, LEAVES) else type(each).__qualname__) for where, each in found)


def _content(value: Any, fields: Fields) -> _Content:
    return value if isinstance(value, _Content) else _Content(value, fields)
