"""Files of tensors in the format of safetensors: a header in JSON, then the bytes of all tensors. Nothing is unpickled."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import CheckpointProblem, DamagedCheckpoint

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""The dtypes that a file holds, with their names in it."""

_STEP_BYTES = 2**24


class FileEntry(NamedTuple):
    """A file of a checkpoint: its length in bytes, and its SHA-256 in hexadecimal digits."""

    size: int
    digest: str


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype that files hold; CheckpointProblem for another."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointProblem(f"a checkpoint holds no tensor of dtype {name}: convert it to one of {', '.join(DTYPES)}")
    return name


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[FileEntry, list[int]]:
    """Writes and syncs a file of named tensors; where each begins in it, in the order that they were given. OSError where it
    cannot be written."""
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index][1].element_size())  # which keeps all of them aligned
    header: dict[str, object] = {}
    starts = [0] * len(tensors)
    end = 0
    for index in order:
        name, tensor = tensors[index]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        starts[index] = begin
        header[name] = {"dtype": DTYPES[dtype_name(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _Hashed(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index in order:
            file.write_tensor(tensors[index][1])
    return file.entry, [start + 8 + len(text) for start in starts]


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Writes and syncs a file."""
    with _Hashed(path) as file:
        file.write(content)
    return file.entry


class _Hashed:
    """A file that is written once, synced when it is closed, and hashed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.file, self.hash, self.size = path.open("xb"), hashlib.sha256(), 0

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, *error: object) -> None:
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.size, self.hash.hexdigest())

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.hash.update(content)
        self.size += len(content)

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """The bytes of a tensor in the order of its elements; copied to the host only while it is written."""
        data = tensor.detach().to("cpu").contiguous()
        count = data.numel() * data.element_size()
        if not count:
            return
        content = memoryview((ctypes.c_char * count).from_address(data.data_ptr())).cast("B")
        for begin in range(0, count, _STEP_BYTES):
            self.write(content[begin : begin + _STEP_BYTES])


def check_file(path: Path, entry: FileEntry) -> None:
    """DamagedCheckpoint where a file is not the one that was written."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise DamagedCheckpoint(f"{path} has {size} bytes, and {entry.size} were written")
        found = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(_STEP_BYTES):
                found.update(part)
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read {path}: {error.strerror}") from None
    if found.hexdigest() != entry.digest:
        raise DamagedCheckpoint(f"{path} has another checksum than the one that was written")


def mapped_part(path: Path, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over a private map of its own bytes of a file, from `start` on: memory is taken, and the file read, only where it
    is looked at, and address space until the tensor is dropped. OSError or ValueError where the file does not have them."""
    count = prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start + count:
            raise ValueError("it is shorter than it was")
        found = mmap.mmap(file.fileno(), start - page + count, access=mmap.ACCESS_COPY, offset=page)
    content = torch.frombuffer(found, dtype=torch.uint8, count=count, offset=start - page)
    if start % dtype.itemsize:  # files of other writers need not be aligned
        content = content.clone()
    return content.view(dtype).view(tuple(shape))


class OpenTensors:
    """The tensor files of a checkpoint, of which a part is mapped into memory while it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over the bytes of the file at `start`. DamagedCheckpoint where it cannot be read."""
        try:
            return mapped_part(self.folder / name, start, dtype, shape)
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"cannot read {self.folder / name}: {error}") from None
