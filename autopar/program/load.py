"""Compiles the program's text into a module whose tracebacks show its lines."""

from __future__ import annotations

import hashlib
import linecache
import sys
from types import ModuleType


def load_program(text: str) -> ModuleType:
    """The module of a program's text, with the class ``Program``. The same text gives the same module."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    name, path = f"autopar_program_{digest}", f"<autopar program {digest}>"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    sys.modules[name] = module
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
