"""One safetensors file: the length of a header in 8 bytes, the header in JSON (dtype, shape and place of each tensor), then the
bytes of all tensors without gaps."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ..checkpoint.tensor_file import DTYPES, mapped_part
from ..errors import CheckpointProblem, DamagedCheckpoint

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the format."""

_BY_NAME: dict[str, torch.dtype] = {stored: getattr(torch, name) for name, stored in DTYPES.items()}
_STEP_BYTES = 2**24


class StoredWeight(NamedTuple):
    """A tensor of a file; `start`: its first byte in the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file, whose tensors follow in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[str(dtype).removeprefix("torch.")], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, StoredWeight], int]:
    """The tensors of a file by name, and its length in bytes. DamagedCheckpoint where it is cut or no safetensors file."""

    def damaged(what: str) -> NoReturn:
        raise DamagedCheckpoint(f"{path} {what}: it is cut or no safetensors file; download or export it anew")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or not 2 <= length <= min(size - 8, LONGEST_HEADER):
                damaged(f"has {size} bytes and says that its header has {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointProblem(f"cannot read {path}: {error.strerror}: name a folder that all nodes share") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        damaged("has a header that is no JSON object")
    header.pop("__metadata__", None)
    out: dict[str, StoredWeight] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        found, span = _stored(path, name, entry, 8 + length)
        if span[1] - span[0] != found.size:
            damaged(f"has {span[1] - span[0]} bytes for {name!r}, which needs {found.size}")
        out[name] = found
        spans.append(span)
    end = 0
    for begin, after in sorted(spans):
        if begin != end:
            damaged("has tensors that overlap, or gaps between them")
        end = after
    if 8 + length + end != size:
        damaged(f"has {size} bytes, and its header says {8 + length + end}")
    return out, size


def _stored(path: Path, name: str, entry: Any, base: int) -> tuple[StoredWeight, tuple[int, int]]:
    """An entry of a header. CheckpointProblem for a dtype that torch has not, DamagedCheckpoint for anything else that is odd."""
    said = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = said.get("shape"), said.get("data_offsets"), said.get("dtype")
    fits = isinstance(shape, list) and len(shape) <= 64 and isinstance(offsets, list) and len(offsets) == 2
    numbers: list[Any] = [*shape, *offsets] if fits else []  # type: ignore[misc]
    if not fits or not all(type(n) is int and 0 <= n < 2**62 for n in numbers) or not isinstance(dtype, str):
        raise DamagedCheckpoint(f"{path} does not say dtype, shape and place of {name[:200]!r}: download or export it anew")
    if dtype not in _BY_NAME:
        raise CheckpointProblem(
            f"{path} has {name[:200]!r} in {dtype[:20]}, which is quantised or unknown: load weights in {', '.join(_BY_NAME)}"
        )
    *sizes, begin, end = numbers
    return StoredWeight(path.name, _BY_NAME[dtype], tuple(sizes), base + begin), (begin, end)


def mapped(path: Path, weight: StoredWeight) -> torch.Tensor:
    """The tensor over a map of its own bytes of the file. CheckpointProblem where they cannot be read."""
    try:
        return mapped_part(path, weight.start, weight.dtype, weight.shape)
    except (OSError, ValueError) as error:
        raise CheckpointProblem(f"cannot read {path}: {error}: download or export it anew") from None


class WeightFileWriter:
    """Writes a file tensor by tensor, in the order that its header says, and syncs it when it is closed."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.file = path.open("wb")
        self.file.write(header)

    def write(self, tensor: torch.Tensor) -> None:
        """The next tensor; copied to the host only while it is written."""
        data = tensor.detach().to("cpu").contiguous()
        count = data.numel() * data.element_size()
        if count:
            content = memoryview((ctypes.c_char * count).from_address(data.data_ptr())).cast("B")
            for begin in range(0, count, _STEP_BYTES):
                self.file.write(content[begin : begin + _STEP_BYTES])

    def close(self) -> None:
        """OSError where not all of it can be kept."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
