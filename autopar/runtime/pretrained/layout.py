"""The division of an export into files of the Hub's names, which take the place of an earlier export's."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoint.folder_sync import sync_folder
from ..checkpoint.tensor_file import write_bytes
from ..errors import CheckpointProblem
from .weight_files import INDEX, SINGLE

_PART = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class ExportedTensor(NamedTuple):
    """A tensor as it will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: Part | None = None

    @property
    def size(self) -> int:
        """The bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """A box of a tensor of the model, where it is written as several."""

    whole: ExportedTensor
    start: tuple[int, ...]
    size: tuple[int, ...]


def byte_count(size: int | str) -> int:
    """Bytes of ``5GB``, ``200MiB`` or a number. CheckpointProblem for anything else."""
    match = re.fullmatch(r"([0-9]{1,12})(?:\s*([KMGT]i?B))?", str(size), re.IGNORECASE)
    count = int(match[1]) * _UNITS.get((match[2] or "").upper(), 1) if match and not isinstance(size, bool) else 0
    if not count:
        raise CheckpointProblem(f'max_shard_size={str(size)[:40]} is no size: pass bytes, or text such as "5GB"')
    return count


def divide(tensors: Sequence[ExportedTensor], most: int) -> list[list[ExportedTensor]]:
    """Files of at most `most` bytes, in the model's order; a larger tensor has one of its own. Tensors of large elements come
    first in a file, so that all are aligned."""
    files: list[list[ExportedTensor]] = [[]]
    room = most
    for each in tensors:
        if each.size > room and files[-1]:
            files.append([])
            room = most
        files[-1].append(each)
        room -= each.size
    return [sorted(file, key=lambda each: -each.dtype.itemsize) for file in files]


def file_names(count: int) -> list[str]:
    """Return the names of so many files."""
    return [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def aside(name: str) -> str:
    """The name of a file until all files are whole."""
    return f".{name}.tmp"


def finish(folder: Path, files: Mapping[str, Sequence[ExportedTensor]]) -> None:
    """Finish the folder on one rank, when all files lie aside: gives them their names. Whoever reads meanwhile finds the earlier
    export, none, or this one, and never parts of both."""
    index = folder / INDEX
    if len(files) == 1:
        (folder / aside(SINGLE)).replace(folder / SINGLE)
        index.unlink(missing_ok=True)
    else:
        index.unlink(missing_ok=True)
        sync_folder(folder)
        for name in files:
            (folder / aside(name)).replace(folder / name)
        index_text = {
            "metadata": {"total_size": sum(each.size for file in files.values() for each in file)},
            "weight_map": {each.name: name for name, file in files.items() for each in file},
        }
        (folder / aside(INDEX)).unlink(missing_ok=True)  # what a run left that was killed
        write_bytes(folder / aside(INDEX), (json.dumps(index_text, indent=2, sort_keys=True) + "\n").encode())
        sync_folder(folder)
        (folder / aside(INDEX)).replace(index)
        (folder / SINGLE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _PART.fullmatch(path.name) and path.name not in files:
            path.unlink()
    sync_folder(folder)


def discard(folder: Path, names: Sequence[str]) -> None:
    """Remove what lies aside."""
    for name in names:
        with contextlib.suppress(OSError):
            (folder / aside(name)).unlink(missing_ok=True)
