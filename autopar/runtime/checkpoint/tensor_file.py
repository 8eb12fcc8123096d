"""Files of tensors in the format of safetensors: the length of a header in 8 bytes, the header in JSON (dtype, shape and place of
each tensor), then the bytes of all tensors without gaps. Nothing is unpickled.

The Python objects of a checkpoint (numbers, text, tensors, lists and dictionaries) are read by torch's restricted unpickler alone
(``weights_only``), which makes nothing else; what it would not read back is refused when it is saved."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointProblem, DamagedCheckpoint
from ..progress import advance

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""The dtypes that a file holds, with their names in it."""

_STEP_BYTES = 2**24
_UNREAD_KIND = re.compile(r"GLOBAL (\S+)")


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


def header_bytes(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return the header of a file, whose tensors follow in this order, and where each of them begins."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = [], 0
    for name, dtype, shape in tensors:
        starts.append(end)
        end += prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [starts[-1], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [start + 8 + len(text) for start in starts]


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[FileEntry, list[int]]:
    """Write and sync a file of named tensors; return where each begins in it, in the order that they were passed. OSError where
    it cannot be written."""
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index][1].element_size())  # which keeps all of them aligned
    ordered = [tensors[index] for index in order]
    header, starts = header_bytes([(name, tensor.dtype, tensor.shape) for name, tensor in ordered])
    with FileWriter(path) as file:
        file.write(header)
        for _, tensor in ordered:
            file.write_tensor(tensor)
            advance(tensor.nbytes)
    by_index = dict(zip(order, starts, strict=True))
    return file.entry, [by_index[index] for index in range(len(tensors))]


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Write and sync a file."""
    with FileWriter(path) as file:
        file.write(content)
    return file.entry


class FileWriter:
    """A new file that is written from begin to end, `hashed` meanwhile, and synced when it is closed."""

    def __init__(self, path: Path, *, hashed: bool = True) -> None:
        self.file, self.hash, self.size = path.open("xb"), hashlib.sha256() if hashed else None, 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Sync the file. OSError where not all of it can be kept."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.size, self.hash.hexdigest() if self.hash is not None else "")

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.size += len(content)
        if self.hash is not None:
            self.hash.update(content)

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write the bytes of a tensor in the order of its elements; it is copied to the host only while it is written."""
        data = tensor.detach().to("cpu").contiguous()
        count = data.numel() * data.element_size()
        if not count:
            return
        content = memoryview((ctypes.c_char * count).from_address(data.data_ptr())).cast("B")
        for begin in range(0, count, _STEP_BYTES):
            self.write(content[begin : begin + _STEP_BYTES])


def check_file(path: Path, entry: FileEntry) -> None:
    """Raise a DamagedCheckpoint where a file is not the one that was written."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise DamagedCheckpoint(f"{path} has {size} bytes, and {entry.size} were written")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(_STEP_BYTES):
                digest.update(part)
                advance(len(part))
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read {path}: {error.strerror}") from None
    if digest.hexdigest() != entry.digest:
        raise DamagedCheckpoint(f"{path} has another checksum than the one that was written")


def mapped_tensor(path: Path, start: int, dtype: torch.dtype, shape: Sequence[int], remedy: str = "") -> torch.Tensor:
    """Return a tensor over a private map of its own bytes of a file, from `start` on: memory is taken, and the file read, only
    where it is looked at, and address space until the tensor is dropped. DamagedCheckpoint where the file does not have them."""
    count = prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < start + count:
                raise ValueError("it is shorter than it was")
            memory = mmap.mmap(file.fileno(), start - page + count, access=mmap.ACCESS_COPY, offset=page)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"cannot read {path}: {error}{remedy}") from None
    content = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start - page)
    if start % dtype.itemsize:  # files of other writers need not be aligned
        content = content.clone()
    return content.view(dtype).view(tuple(shape))


def object_bytes(value: Any) -> bytes:
    """A Python object as torch.save writes it, its tensors on the CPU."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def object_of(content: bytes, where: object) -> Any:
    """The inverse, on the CPU. DamagedCheckpoint, which names `where`, for what is no such value."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of damaged bytes, torch raises many kinds
        raise DamagedCheckpoint(f"{where} cannot be read: {_reason(error)}") from None


def check_plain(values: Mapping[str, Any], name: str) -> None:
    """Raise a CheckpointProblem for an entry of `values` that would not be read back; `name` stands for `values`."""
    for key, value in values.items():
        try:
            torch.load(io.BytesIO(object_bytes(value)), weights_only=True)
        except Exception as error:
            raise CheckpointProblem(
                f"{name}[{key!r}] cannot be saved ({_reason(error)}): a checkpoint holds numbers, text, tensors, lists and "
                "dictionaries of them; save its state_dict()"
            ) from None


def _reason(error: Exception) -> str:
    kind = _UNREAD_KIND.search(str(error))
    return f"it has a {kind[1].rstrip('.')}" if kind else str(error).strip().partition("\n")[0][:200]
