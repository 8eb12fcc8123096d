"""Seconds of one kernel on one device: matrix products, attention, convolutions (as large as they come, with groups, and with few
channels on a CPU), kernels that stream memory, casts to float8, new pages.

A roofline (Williams, Waterman, Patterson 2009) whose compute side depends on the shape, as measured kernels do:

* Products are distributed over the multiprocessors in tiles, so that a last wave, or a tile at the edge, that is not full costs
  as if it were (NVIDIA, Matrix Multiplication Background User's Guide: tile and wave quantization). A short inner dimension does
  not pay for the prologue of a tile. Loads of the operands bound both small tiles and the prologue, so what a product loses to
  them is seconds, not a share: where the arithmetic takes 16 times as long (float32 on the vector units of an A100), 1/16 of it,
  as in attention written out on an A100 (github.com/facebookresearch/xformers, pull requests 387 and 587).
* Flash attention: heads of 64 reach about 0.84 of heads of 128, short sequences less than long ones, and its backward about 0.8
  of the forward's rate (FlashAttention-2, arXiv 2307.08691, figures 4 to 6: 190 and 225 TFLOP/s at heads of 64 and 128,
  causal forward from 512 to 16k tokens, backward 170 to 196, all on A100). Without a causal mask each query sees all keys, and
  short sequences (windows of images) lose less: 252, 295, 308 and 312 TFLOP/s at 512, 1k, 2k and 4k tokens, heads of 64 on H100
  (github.com/Dao-AILab/flash-attention, pull request 2688).

`Device.matmul_fraction` and `attention_fraction` are what large shapes reach; these functions tell which share of it a shape
reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.graph import Node
from autopar.operations.images.convolutions import convolution_groups
from autopar.operations.operation import Sizes
from autopar.operations.table import operation

_FUSED_CASTS = 2.5
"""Accesses of a cast to float8, in elements of bfloat16 size: read for the maximum, read, written at half the size, as a compiler
makes it."""
_EAGER_CASTS = 11.5
"""Kernel by kernel: the magnitude is written and read, the scaled and the clamped tensor are float32."""
MMAP_THRESHOLD_BYTES = 2**25
"""The C library keeps freed memory for the next tensor, but not that of large ones: from its mmap threshold on (glibc raises it
to 32 MiB at most, mallopt(3), M_MMAP_THRESHOLD) each tensor is new memory, whose pages the kernel maps and clears when they are
written first."""
_TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
"""Rows, columns, and which share of the largest tile's rate a kernel with that tile reaches at best."""

_INNER = 64
"""Elements of the inner dimension that take as long as the prologue and the store of a tile."""

_ROW = 16
"""Bytes at whose multiples a row must begin."""

VECTOR_DTYPE = "float32"
"""The dtype at whose rate the vector units compute."""

_CONVERTED = 1.27
"""The factor by which products of 16 bits take longer than products of float32, both on the vector units: the least of 1.27 to
1.57 in five pairs of attention of 197 tokens on an A100, less the time of its other kernels
(github.com/facebookresearch/xformers, pull request 587); their absolute times ask for less."""

_HEAD = 30
_SEQUENCE = 300
_WHOLE_SEQUENCE = 100
"""Tokens at which sequences reach half of the rate: under a causal mask or a band, and without."""
ATTENTION_BACKWARD = 0.8


@lru_cache(maxsize=65536)
def product_efficiency(count: int, m: int, n: int, k: int, multiprocessors: int, slowdown: float = 1.0) -> float:
    """Share of the rate of large products that `count` products ``[m, k] x [k, n]`` reach; 1 where tiles do not matter (CPU).
    `slowdown`: how many times longer the arithmetic takes than on the tensor cores in 16 bits, while loads take as long."""
    if not multiprocessors or min(count, m, n, k) < 1:
        return 1.0
    best = 0.0
    for rows, columns, share in _TILES:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        waves = ceil(tiles / multiprocessors)
        best = max(best, min(1.0, share * slowdown) * count * m * n / (waves * multiprocessors * rows * columns))
    return best * k / (k + _INNER / slowdown)


def arithmetic_slowdown(device: Device, dtype: str) -> float:
    """Return the factor by which a product in `dtype` computes longer than one in 16 bits; at least 1."""
    half = max(map(device.peak_flops_per_second, ("bfloat16", "float16")))
    return max(1.0, half / device.matrix_peak_flops_per_second(dtype))


@lru_cache(maxsize=4096)
def attention_efficiency(queries: int, head: int, backward: bool, whole: bool = False) -> float:
    """Share of the rate of long sequences and heads of 128. `whole`: every query sees all keys."""
    half = _WHOLE_SEQUENCE if whole else _SEQUENCE
    shape = (head / (head + _HEAD)) * (128 + _HEAD) / 128 * queries / (queries + half)
    return shape * (ATTENTION_BACKWARD if backward else 1.0)


def rows_aligned(device: Device, dtype: str, n: int, k: int) -> bool:
    """Whether a batched product may use the tensor cores: they want rows that begin at multiples of 16 bytes (NVIDIA, Mixed
    Precision Training guide: multiples of 8 half-precision elements). Heads of 108 make a whole step a third slower than heads of
    144 (BigScience, tr11 chronicles-prequel, NHEADS comparison). cuBLAS 11 may use tensor cores for any row (Matrix
    Multiplication Background User's Guide, 2.2), but what was measured (`_CONVERTED`) is the rate of the vector units."""
    size = itemsize(dtype)
    return not device.multiprocessors or size >= 4 or (n * size % _ROW == 0 and k * size % _ROW == 0)


def product_flops_per_second(device: Device, dtype: str, aligned: bool) -> float:
    """Return the FLOP/s that large products reach, with rows that are `aligned` or not."""
    if aligned:
        return device.product_flops_per_second(dtype)
    return device.peak_flops_per_second(VECTOR_DTYPE) * device.matmul_fraction / _CONVERTED


def product_seconds(
    device: Device, dtype: str, count: int, m: int, n: int, k: int, aligned: bool = True, batched: bool = False
) -> float:
    """``2 count m n k / (peak x fraction x efficiency)``. What slow arithmetic loses to loads was measured on `batched` products
    alone; others are priced as if they lost the same share."""
    slowdown = arithmetic_slowdown(device, dtype if aligned else VECTOR_DTYPE) if batched else 1.0
    efficiency = product_efficiency(count, m, n, k, device.multiprocessors, slowdown)
    return 2.0 * count * m * n * k / (product_flops_per_second(device, dtype, aligned) * efficiency)


def attention_seconds(
    device: Device, dtype: str, flops: float, queries: int, head: int, backward: bool, whole: bool = False
) -> float:
    """``FLOPs / (peak x fraction x efficiency)``; on a CPU without the shape's share."""
    rate = device.matrix_peak_flops_per_second(dtype) * device.attention_share(whole)
    share = attention_efficiency(queries, head, backward, whole) if device.multiprocessors else 1.0
    return flops / (rate * share)


TRANSCENDENTAL_BACKWARD = 2.0
"""Seconds of a transcendental operation's backward over its forward: it computes the function and its derivative."""


def operation_seconds(device: Device, arithmetic_seconds: float, memory_seconds: float, kernels: int) -> float:
    """The slower of arithmetic and memory, and at least the launches; on a CPU, which starts nothing while it computes, they
    add: its products first pack their operands into caches (K. Goto, R. van de Geijn, Anatomy of High-Performance Matrix
    Multiplication, 2008. Measured: 8 to 64 rows by 2048 x 2048 take 1.2 ms besides their arithmetic)."""
    launches = kernels * device.launch_seconds
    if device.kind == "cpu":
        return launches + arithmetic_seconds + memory_seconds
    return max(arithmetic_seconds, memory_seconds, launches)


def product_memory_seconds(device: Device, accessed_bytes: float) -> float:
    """Return the seconds of the traffic of a matrix product's operands and results, besides its arithmetic."""
    rate = device.product_bytes_per_second
    return accessed_bytes / rate if rate else streaming_seconds(device, accessed_bytes)


def streaming_seconds(device: Device, accessed_bytes: float) -> float:
    """``bytes / (bandwidth x fraction)``."""
    return accessed_bytes / (device.bandwidth_bytes_per_second * device.bandwidth_fraction)


def scaling_seconds(device: Device, operand_bytes: float, result_bytes: float) -> tuple[float, float]:
    """Return the seconds of the casts of one linear layer to float8 with dynamic scaling, as torchao runs them beside the
    product, on one rank, forward and backward, from the bytes of x and the weight, and those of the result.

    Each operand is read for its largest magnitude, read again, and written in float8: x and the weight in the forward, and both
    and the gradient of the result in the backward (torchao keeps nothing of the forward's casts)."""
    accesses = _FUSED_CASTS if device.fused else _EAGER_CASTS
    return (
        streaming_seconds(device, accesses * operand_bytes),
        streaming_seconds(device, accesses * (operand_bytes + result_bytes)),
    )


def fresh_page_seconds(device: Device, tensor_bytes: Iterable[float]) -> float:
    """Return the seconds that the operating system takes to map the pages of new tensors on a CPU, by their sizes; 0 where the
    device says nothing of it, as for GPUs, whose memory PyTorch's allocator keeps."""
    if not device.fresh_page_bytes_per_second:
        return 0.0
    return sum(size for size in tensor_bytes if size >= MMAP_THRESHOLD_BYTES) / device.fresh_page_bytes_per_second


class Convolution(NamedTuple):
    """The global shapes of its image and result, the dim of their channels, and `_group_product`."""

    image: Sizes
    result: Sizes
    channel_dim: int
    group_product: tuple[int, int, int, int] | None


def convolution(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> Convolution | None:
    """None of other operations."""
    if not operation(node.op).convolution or len(a) < 2:
        return None
    return Convolution(a[0], out[0], int(len(a[0]) == len(a[1])), _group_product(node, a, out))


def _group_product(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> tuple[int, int, int, int] | None:
    """The matrix products of a convolution with groups: how many, and rows (pixels), columns and inner dimension of each."""
    if len(a[0]) != len(a[1]) or (groups := convolution_groups(node, a, out)) == 1:
        return None
    result = out[0]
    return groups, result[0] * prod(result[2:]), result[1] // groups, a[0][1] // groups * prod(a[1][2:])


def convolution_flops_per_second(device: Device, dtype: str, known: Convolution, image: Sizes, result: Sizes) -> float:
    """The rate with shards `image` and `result`. With groups each is a small product: in tiles, or on the vector units (at the
    rate of float32), whichever is faster. Without, a CPU pads channels to whole vectors."""
    if known.group_product is None:
        lanes = device.vector_bits // (8 * itemsize(dtype))
        padded = channel_efficiency(image[known.channel_dim], lanes) * channel_efficiency(result[known.channel_dim], lanes)
        return device.convolution_flops_per_second(dtype) * padded
    rate = device.product_flops_per_second(dtype)
    return max(
        rate * product_efficiency(*known.group_product, device.multiprocessors),
        min(rate, device.product_flops_per_second(VECTOR_DTYPE)),
    )


def channel_efficiency(channels: int, lanes: int) -> float:
    """Share of the work that is not padding: kernels for CPUs keep channels in blocks of a vector's width, the last one filled
    with zeros (oneDNN Developer Guide, Understanding Memory Formats: blocked layout. Measured, AVX-512, 32 x 32 pixels: 105
    GFLOP/s from 24 to 24 channels, 127 from 72 to 24, 23 from 24 to 3, and 204 to 232 between multiples of 16)."""
    return channels / (lanes * ceil(channels / lanes)) if lanes > 1 else 1.0
