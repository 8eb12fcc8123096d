"""Compiles the program's text into a module whose tracebacks show its lines, and lives as long as something of it is used."""

from __future__ import annotations

import hashlib
import importlib.abc
import linecache
import sys
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_PREFIX = "autopar_program_"
_LOADED: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()
"""All that are alive, by name."""


class _Programs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a program by its name, as unpickling and torch.compile do: `sys.modules` would keep each for ever."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, origin=_LOADED[name].__file__) if name.startswith(_PREFIX) and name in _LOADED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LOADED[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has run."""


def load_program(text: str) -> ModuleType:
    """The module of a program's text, with the class ``Program``. The same text gives the same module."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    name, path = f"{_PREFIX}{digest}", f"<autopar program {digest}>"
    if (known := _LOADED.get(name)) is not None:
        return known
    if not any(isinstance(each, _Programs) for each in sys.meta_path):
        sys.meta_path.append(_Programs())
    module = ModuleType(name)
    module.__file__ = path
    exec(compile(text, path, "exec"), module.__dict__)
    module.__dict__["_itself"] = module  # its functions keep its globals, and these the module
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    weakref.finalize(module, linecache.cache.pop, path, None).atexit = False
    _LOADED[name] = module
    return module
