"""Tensors whose values are part of the program: those that a model holds outside of its parameters and buffers."""

from __future__ import annotations

import zlib
from base64 import b64decode
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

_NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}


def constant(shape: Sequence[int], values: Sequence[Any], dtype: torch.dtype, mesh: Any) -> torch.Tensor:
    """The tensor of `shape` on this rank's device. `values` are its numbers, row by row; or the dtype that they are packed in,
    and pieces of text, together the base64 of their bytes as zlib packs them."""
    return _constant(tuple(shape), tuple(values), dtype, mesh.device)


@lru_cache(maxsize=256)
def _constant(shape: tuple[int, ...], values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return unpacked(shape, values, dtype).to(device)


def unpacked(shape: Sequence[int], values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """The tensor on the CPU. ValueError where the values are not those of such a tensor."""
    if not values or not isinstance(values[0], str):
        return torch.tensor(list(values), dtype=dtype).reshape(tuple(shape))
    packed = _DTYPES[values[0]]
    size = prod(shape) * packed.itemsize
    packer = zlib.decompressobj()
    data = packer.decompress(b64decode("".join(values[1:])), size + 1)
    if len(data) != size:
        raise ValueError(f"a constant of shape {tuple(shape)} has {len(data)} bytes instead of {size}")
    return torch.frombuffer(bytearray(data), dtype=packed).reshape(tuple(shape)).to(dtype)
