"""Compiled code as bytes that another process takes into its caches: torch's mega-cache, and the C++ files that it leaves out.
Seen on 2.13.0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import torch

_MEGA_CACHE = "mega-cache"
_SUFFIXES = (".so", ".o", ".gch")
"""Of C++ kernels: libraries, what they are linked from, and headers that the next kernel includes."""


class CompiledCode:
    """The content of `recorded_code`, once that has ended: empty where nothing was compiled."""

    content: bytes = b""


@contextmanager
def recorded_code() -> Iterator[CompiledCode]:
    """Record all that is compiled inside, or found in a cache."""
    from torch.compiler._cache import CacheArtifactManager

    code, before = CompiledCode(), set(_files())
    with CacheArtifactManager.with_fresh_cache():
        yield code
        artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        archive = BytesIO()
        with ZipFile(archive, "w") as files:
            files.writestr(_MEGA_CACHE, artifacts[0])
            for path in set(_files()) - before:
                files.write(path, path.relative_to(_folder()))
        code.content = archive.getvalue()


def take_code(content: bytes) -> None:
    """Put what another process of this job compiled into the caches of this one."""
    from torch._inductor.codecache import write_atomic

    with ZipFile(BytesIO(content)) as files:
        for name in files.namelist():
            path = _folder() / name
            if name != _MEGA_CACHE and not path.exists():
                write_atomic(str(path), files.read(name), make_dirs=True)
        torch.compiler.load_cache_artifacts(files.read(_MEGA_CACHE))


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _files() -> Iterator[Path]:
    return (path for path in _folder().rglob("*") if path.suffix in _SUFFIXES)
