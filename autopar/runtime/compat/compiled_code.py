"""Compiled code as bytes that another process takes into its caches: torch's mega-cache, and the libraries of C++ that it leaves
out. Seen on 2.13.0."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import torch
from torch._dynamo.utils import counters

_MEGA_CACHE = "mega-cache"


class CompiledCode:
    """The code that a process compiles, or finds in a cache, from now on."""

    def __init__(self) -> None:
        self.before = _loaded_modules()

    def archive(self) -> bytes:
        """Return the code so far as bytes for `take_code`: empty where there is none. Libraries are under the name of the
        processor that they are for. Without what they are linked from, and torch's precompiled headers, of 150 MB each."""
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return b""
        archive = BytesIO()
        with ZipFile(archive, "w", ZIP_DEFLATED) as files:
            files.writestr(_MEGA_CACHE, artifacts[0])
            kernels = (sys.modules[name].__file__ for name in _loaded_modules() - self.before if name in sys.modules)
            for path in {*map(Path, filter(None, kernels)), *_trial_libraries()}:
                if path.is_relative_to(_folder()):
                    files.write(path, f"{processor()}/{path.relative_to(_folder())}")
        return archive.getvalue()


@contextmanager
def recorded_code() -> Iterator[CompiledCode]:
    """Record all that is compiled inside, or found in a cache."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        yield CompiledCode()


def take_code(content: bytes) -> None:
    """Put what another process of this job compiled into the caches of this one; libraries only where they are for its
    processor."""
    from torch._inductor.codecache import write_atomic

    with ZipFile(BytesIO(content)) as files:
        for name in files.namelist():
            path = _folder() / name.removeprefix(f"{processor()}/")
            if name.startswith(f"{processor()}/") and not path.exists():
                write_atomic(str(path), files.read(name), make_dirs=True)
        torch.compiler.load_cache_artifacts(files.read(_MEGA_CACHE))


def cache_hits() -> int:
    """Return the number of graphs that this process found in torch's caches so far."""
    return int(counters["aot_autograd"]["autograd_cache_hit"])


@cache
def processor() -> str:
    """Return a name that processors share which execute the same instructions: torch compiles C++ for all that there are."""
    instructions = platform.processor()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                instructions = flags
                break
    return hashlib.sha256(instructions.encode()).hexdigest()[:16]


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _loaded_modules() -> set[str]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return set(CppPythonBindingsCodeCache._loaded_module_names)


def _trial_libraries() -> Iterator[Path]:
    """The libraries that torch compiles in order to see which vector instructions there are, a second each."""
    for path in _folder().glob("??/*.so"):
        if not path.name.endswith(".main.so") and path.with_suffix(".cpp").exists():
            yield path
