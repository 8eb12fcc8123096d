"""Graphs of exports, as files of a run of tests: what one process exported, the others read.

A file's name is the digest of what `support.capture_cache` keeps an export under. There classes and functions count as the
objects that they are; here as their code and the values of their attributes, so that one that a test replaced is another one.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from autopar.capture.export import Export
from autopar.ir.graph import Graph
from autopar.runtime.plain.frozen_reads import LEAVES, Reads

_NO_CODE = frozenset(("__annotations__", "__dict__", "__doc__", "__weakref__"))
_BUILT_IN = frozenset(("getset_descriptor", "member_descriptor", "method_descriptor", "wrapper_descriptor"))
_BUILT_IN_METHODS = frozenset(("builtin_function_or_method", "classmethod_descriptor"))


class SharedExport(Export):
    """A graph without its export, which is made where a call of another size asks for it; or is that of another batch (`origin`).

    `arguments` are those of the call that has it: the model of the call before may have changed since."""

    def __init__(self, arguments: tuple[Any, ...], graph: Graph, *, symbolic: bool, origin: Export | None = None) -> None:
        self.arguments, self.graph, self.symbolic, self.lengths = arguments, graph, symbolic, {}
        self.origin = self.whole = origin

    def of_call(self, arguments: tuple[Any, ...]) -> SharedExport:
        """The same for another call."""
        return SharedExport(arguments, self.graph, symbolic=self.symbolic, origin=self.origin)

    @property
    def is_open(self) -> bool:
        return self.symbolic

    def graph_at(self, tensors: Mapping[str, Tensor]) -> Graph | None:
        if self.whole is None:
            self.whole = Export(*self.arguments)
        return self.whole.graph_at(tensors)


def file_of(key: tuple[Any, ...]) -> Path | None:
    """The file of the export of this key; None where it has something that other processes cannot know."""
    text, definitions, *more = key
    folder = os.environ.get("AUTOPAR_TEST_RUN")
    digest = hashlib.sha256(text)
    try:
        for part in _Description().of((definitions, list(map(repr, more)))):
            digest.update(part.encode())
    except (pickle.PicklingError, ValueError):  # ValueError: of a closure that is empty yet
        return None
    return Path(folder, "exports", digest.hexdigest()) if folder else None


def read(file: Path, arguments: tuple[Any, ...]) -> tuple[Export, Reads]:
    graph, symbolic, reads = pickle.loads(file.read_bytes())
    return SharedExport(arguments, graph, symbolic=symbolic), reads


def write(file: Path, export: Export, reads: Reads) -> None:
    """Write the file, unless sizes beside the batch stayed open."""
    if export.lengths:
        return
    file.parent.mkdir(exist_ok=True)
    whole = file.with_suffix(f".{os.getpid()}")
    whole.write_bytes(pickle.dumps((export.graph, export.is_open, reads)))
    whole.replace(file)


class _Description:
    """The words of a value that are the same in every process. PicklingError for one that has none."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.alive = list[Any]()  # so that no other object has its id

    def of(self, value: Any) -> Iterator[str]:
        kind = type(value)
        yield f" {kind.__module__}.{kind.__qualname__}"
        if isinstance(value, LEAVES) or value is Ellipsis or value is NotImplemented:
            yield f" {value!r}"
            return
        if id(value) in self.seen:
            yield f" {self.seen[id(value)]}"
            return
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        for part in self._parts(value):
            yield from self.of(part)

    def _parts(self, value: Any) -> Iterator[Any]:
        name = type(value).__name__
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from (value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, cells)
        elif isinstance(value, CodeType):
            yield from (value.co_filename, value.co_firstlineno, value.co_code, value.co_names, value.co_varnames)
            yield from value.co_consts
        elif isinstance(value, type) or name in _BUILT_IN or name in _BUILT_IN_METHODS:
            yield from (value.__module__ if isinstance(value, type) else "", value.__qualname__)
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, classmethod | staticmethod):
            yield value.__func__
        elif isinstance(value, Mapping):
            yield from (each for item in value.items() if item[0] not in _NO_CODE for each in item)
        elif isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, set | frozenset):
            yield sorted(map(repr, value))
        elif hasattr(value, "__dict__"):
            yield vars(value)
        elif hasattr(value, "__slots__"):
            yield [getattr(value, slot, None) for slot in value.__slots__]
        else:
            raise pickle.PicklingError(f"a {name}")
