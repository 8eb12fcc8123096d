"""The manifest of a checkpoint: its files with checksums, and where each part of each tensor is. It has a checksum of its own,
and is checked word by word when it is read, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata

from ..errors import DamagedCheckpoint
from .tensor_file import DTYPES, FileEntry

MANIFEST = "manifest.json"
OBJECTS = "objects.pt"
VERSION = 1
_FILE_NAME = re.compile(r"rank_[0-9]{5,9}\.safetensors|objects\.pt")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEGIN, _MIDDLE, _END = b'{"sha256": "', b'", "manifest": ', b"}\n"
_MOST = 2**62
MOST_ANCESTORS = 64
"""The longest list of a checkpoint's ancestors, and more than any tensor has dimensions."""


class Chunk(NamedTuple):
    """A part of a tensor: the box of `sizes` elements at `offsets`, whose bytes begin at `start` of the file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its dtype (``float32``), its shape, and its parts, which cover it and do not overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class Manifest(NamedTuple):
    """The list of a checkpoint's parts. `axes`: the mesh that wrote it. `number`, `ancestors`: see `folders`."""

    step: int
    processes: int
    axes: dict[str, int]
    torch: str
    files: dict[str, FileEntry]
    tensors: dict[str, StoredTensor]
    number: int = 0
    ancestors: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Return JSON, with the checksum of what follows it."""
        names = list(self.files)
        tensors = {
            name: [each.dtype, each.shape, [[c.offsets, c.sizes, names.index(c.file), c.start] for c in each.chunks]]
            for name, each in self.tensors.items()
        }
        value = {"format": "autopar checkpoint", "version": VERSION, **self._asdict(), "tensors": tensors}
        body = json.dumps(value, separators=(",", ":")).encode()
        return _BEGIN + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _END

    @staticmethod
    def from_bytes(content: bytes, where: object) -> Manifest:
        """The inverse. DamagedCheckpoint, which names `where`, for anything else."""
        return _read(content, where)

    def metadata(self) -> Metadata:
        """Return the metadata of torch's planners."""
        return Metadata({name: _tensor_metadata(each) for name, each in self.tensors.items()})


def _tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(tensor.torch_dtype), torch.Size(tensor.shape), chunks)


def _read(content: bytes, where: object) -> Manifest:
    def refuse(problem: str) -> NoReturn:
        raise DamagedCheckpoint(f"{where} {problem}")

    head = len(_BEGIN) + 64
    body = content[head + len(_MIDDLE) : len(content) - len(_END)]
    digest = content[len(_BEGIN) : head]
    framed = content.startswith(_BEGIN) and content[head : head + len(_MIDDLE)] == _MIDDLE and content.endswith(_END)
    if not framed or hashlib.sha256(body).hexdigest().encode() != digest:
        refuse("is cut or changed: its checksum is another one")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        refuse("is not JSON")
    if not isinstance(value, dict) or value.get("format") != "autopar checkpoint":
        refuse("is no manifest of a checkpoint")
    if value.get("version") != VERSION:
        refuse(f"is of version {str(value.get('version'))[:20]!r}, and this autopar reads {VERSION}")
    try:
        files = {name: FileEntry(_number(size), digest) for name, (size, digest) in _mapping(value["files"]).items()}
        axes = {name: _number(size) for name, size in _mapping(value["axes"]).items()}
        names = list(files)
        tensors = {name: _tensor(each, names) for name, each in _mapping(value["tensors"]).items()}
        branch = _number(value.get("number", 0)), _numbers(value.get("ancestors", []))
        words = _number(value["step"]), _number(value["processes"]), axes, str(value["torch"])[:100]
        manifest = Manifest(*words, files, tensors, *branch)
        _check(manifest)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        refuse(f"is damaged ({type(error).__name__}: {str(error)[:200]})")
    return manifest


def _tensor(value: Any, names: list[str]) -> StoredTensor:
    dtype, shape, chunks = value
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(chunks, list):
        raise ValueError(f"no dtype {str(dtype)[:20]!r}")
    parts = tuple(
        Chunk(_numbers(offsets), _numbers(sizes), names[_number(file)], _number(start)) for offsets, sizes, file, start in chunks
    )
    return StoredTensor(dtype, _numbers(shape), parts)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a list where names are expected")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_ANCESTORS:
        raise ValueError("no list of sizes")
    return tuple(_number(each) for each in value)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"no size: {str(value)[:40]!r}")
    return value


def _check(manifest: Manifest) -> None:
    """Raise a ValueError where files, tensors and parts do not fit together."""
    if OBJECTS not in manifest.files:
        raise ValueError(f"no file {OBJECTS}")
    for name, entry in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or not isinstance(entry.digest, str) or not _DIGEST.fullmatch(entry.digest):
            raise ValueError(f"file {name[:80]!r}")
    left = sum(entry.size for entry in manifest.files.values())
    for name, tensor in manifest.tensors.items():
        item, rank, elements = tensor.torch_dtype.itemsize, len(tensor.shape), 0
        for chunk in tensor.chunks:
            size = prod(chunk.sizes)
            inside = len(chunk.offsets) == len(chunk.sizes) == rank and all(
                offset + extent <= whole for offset, extent, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
            )
            if not inside or chunk.start + size * item > manifest.files[chunk.file].size or chunk.file == OBJECTS:
                raise ValueError(f"a part of tensor {name[:200]!r} that lies outside")
            elements += size
        if elements != prod(tensor.shape) or not tensor.chunks:
            raise ValueError(f"tensor {name[:200]!r} has parts of {elements} elements and shape {tensor.shape}")
        left -= elements * item
    if left < 0:
        raise ValueError("more tensors than bytes")
