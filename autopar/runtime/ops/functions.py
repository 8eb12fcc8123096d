"""Operations whose sharded form is another algorithm (vocabulary-parallel tables), those that capture makes one node, tensors
whose values are part of the program, and linear layers in float8: torchao's products with dynamic scaling of whole tensors (seen
on torchao 0.18, torch 2.13). The scale of a tensor is that of this rank's shard, as in torchao under FSDP. torchao is imported at
the first call, and nothing else here needs it."""

from __future__ import annotations

import math
import zlib
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..device.axis import AxisHandle


def full_precision(x: torch.Tensor) -> torch.Tensor:
    """Return half precision in float32, and all else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def linear_kn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x[..., k] @ weight[k, n] + bias[n]``: GPT-2's Conv1D."""
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


PAIR_LAYOUTS = "halves", "interleaved", "interleaved to halves"


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str = "halves") -> torch.Tensor:
    """Rotate each pair ``(x1, x2)`` of ``x[..., d]`` by an angle, ``(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`` (RoFormer, arXiv
    2104.09864). Pairs are the elements i and i + d/2 (``halves``), 2i and 2i + 1 (``interleaved``), or the latter in x and the
    former in the result (``interleaved to halves``).

    `cos` and `sin` broadcast to x. Their last dimension is laid out as the result's, or has d/2 elements, one for each pair."""
    (of_x, _, _), (_, _, of_result) = layout.partition(" to "), layout.rpartition(" to ")
    first, second = _pairs(x, of_x)
    if of_x != of_result:
        x = _joined(first, second, of_result)
    if cos.shape[-1] != x.shape[-1]:
        cos, sin = (_joined(table, table, of_result) for table in (cos, sin))
    return x * cos + _joined(-second, first, of_result) * sin


def _pairs(x: torch.Tensor, layout: str) -> Sequence[torch.Tensor]:
    return x.unflatten(-1, (-1, 2)).unbind(-1) if layout == "interleaved" else x.chunk(2, -1)


def _joined(first: torch.Tensor, second: torch.Tensor, layout: str) -> torch.Tensor:
    return torch.stack((first, second), -1).flatten(-2) if layout == "interleaved" else torch.cat((first, second), -1)


def histogram(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> torch.Tensor:
    """Return ``torch.histc``; its kernels take integers on some devices only."""
    if x.is_floating_point() or x.is_cuda:
        return torch.histc(x, bins, low, high)
    return torch.histc(x.double(), bins, low, high).to(x.dtype)


def ctc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Return the loss of each example ``[B]``: ``log_probs [T, B, C]``, ``targets [B, U]`` padded at their ends, lengths
    ``[B]``."""
    operands = (full_precision(log_probs), targets.contiguous(), input_lengths, target_lengths)
    return F.ctc_loss(*operands, blank, reduction="none", zero_infinity=zero_infinity)


def count_valid(target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the number of targets that are not `ignore_index`, a float32 scalar."""
    return (target != ignore_index).sum().float()


def embedding_sharded(ids: torch.Tensor, weight: torch.Tensor, axis: AxisHandle, padding_idx: int | None = None) -> torch.Tensor:
    """Lookup in a table that is sharded by rows, ``weight[V / n, D]``: partial sums ``[..., D]``, zero where another rank has the
    row."""
    rows = weight.shape[0]
    local = ids - axis.span(rows, ids)[0]
    if axis.size == 1:
        return F.embedding(local, weight, padding_idx)
    elsewhere = (local < 0) | (local >= rows)
    vectors = F.embedding(local.masked_fill(elsewhere, 0), weight)
    if padding_idx is not None:
        vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
    return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


def local_mean(x: torch.Tensor, dims: Sequence[int], correction: int = 0) -> torch.Tensor:
    """The mean over this rank's examples, expanded to each of them (dimension 0 is among `dims`); the sum is divided by the
    number of elements minus `correction`."""
    count = math.prod(x.shape[dim] for dim in dims)
    total = x.sum(tuple(dims), keepdim=True) / (count - correction)
    return total.expand(x.shape[0], *total.shape[1:])


_NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}


def constant(shape: Sequence[int], values: Sequence[Any], dtype: torch.dtype, mesh: Any) -> torch.Tensor:
    """The tensor of `shape` on this rank's device. `values` are its numbers, row by row; or the dtype that they are packed in,
    and pieces of text, together the base64 of their bytes as zlib packs them."""
    value = _constant(tuple(shape), tuple(values), dtype, mesh.device)
    if not torch.compiler.is_compiling() and (held := _held.get()) is not None:
        held.append(value)
    return value


@contextmanager
def held_constants() -> Iterator[list[torch.Tensor]]:
    """A context that lists the constants that are read within, for whoever reads them again by their addresses alone."""
    held = list[torch.Tensor]()
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


_held: ContextVar[list[torch.Tensor] | None] = ContextVar("held_constants", default=None)


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


MULTIPLE = 16
"""The divisor of all sizes of a product; torchao pads the inner ones (tokens, in the gradient of the weight)."""

_LEAST_CAPABILITY = (8, 9)


def float8_problem(device_type: str) -> str:
    """Return the obstacle to float8 products on this machine, and its remedy; empty where there is none."""
    if find_spec("torchao") is None:
        return 'float8 products are those of torchao, which is not installed: pip install torchao, or take precision "bf16"'
    if device_type == "cuda" and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f'{name} has no float8 products (compute capability 8.9 and later have): take precision "bf16"'
    return ""


def linear_float8_dynamic(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``F.linear`` whose product, and those of its gradients, are in float8: ``x [..., k]``, ``weight [n, k]``."""
    function, products, config = _torchao()
    out: torch.Tensor = function.apply(x, weight.t(), products, config)
    return out if bias is None else out + bias.to(out.dtype)


@cache
def _torchao() -> tuple[Any, Any, Any]:
    """The autograd function of torchao's `Float8Linear`, with the two configurations that it takes."""
    layers = import_module("torchao.float8.float8_linear")
    config = import_module("torchao.float8.config").Float8LinearConfig(pad_inner_dim=True)
    layer = layers.Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config)
    return layers.matmul_with_hp_or_float8_args, layer.linear_mm_config, config
