"""Tensors that are neither parameter, buffer nor input: their values become part of the graph, as ``ap.constant(shape, values)``.

Few numbers are written out; more are packed (zlib, base64) in pieces of text, since a plan's strings are short.
"""

from __future__ import annotations

import zlib
from base64 import b64encode

import torch

from autopar.ir.graph import Arg
from autopar.operations.factories import ARANGE, CONSTANT, FULL, SCALAR

WRITTEN_OUT = 32
"""The most numbers that stand in the program as they are."""
LARGEST = 1 << 20
"""Bytes of a packed constant; a larger one is the model's state, and must be a buffer."""
_PIECE = 480


def constant_node(tensor: torch.Tensor) -> tuple[str, tuple[Arg, ...]] | None:
    """The operation that makes this tensor, with its arguments; None where it is too large."""
    tensor = tensor.detach().cpu()
    if not tensor.dim():
        return SCALAR, (tensor.item(),)
    flat = tensor.flatten()
    if not flat.numel() or bool((flat == flat[0]).all()):
        return FULL, (tuple(tensor.shape), flat[0].item() if flat.numel() else 0)
    integers = tensor.dtype in (torch.int32, torch.int64)
    if integers and tensor.dim() == 1 and len(set(tensor.diff().tolist())) == 1:
        step = int(tensor[1] - tensor[0])
        return ARANGE, (int(tensor[0]), int(tensor[-1]) + step, step)
    shape: tuple[Arg, ...] = tuple(tensor.shape)
    if flat.numel() <= WRITTEN_OUT and (not tensor.is_floating_point() or bool(flat.isfinite().all())):
        return CONSTANT, (shape, tuple(flat.tolist()))
    packed = zlib.compress(flat.contiguous().view(torch.uint8).numpy().tobytes(), 9)
    if len(packed) > LARGEST:
        return None
    text = b64encode(packed).decode()
    pieces = tuple(text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return CONSTANT, (shape, (str(tensor.dtype).removeprefix("torch."), *pieces))
