"""Seconds of one kernel on one device: matrix products, attention, and kernels that stream memory.

A roofline (Williams, Waterman, Patterson 2009) whose compute side depends on the shape, as measured kernels do:

* Products are distributed over the multiprocessors in tiles, so that a last wave, or a tile at the edge, that is not full costs
  as if it were (NVIDIA, Matrix Multiplication Background User's Guide: tile and wave quantization). A short inner dimension does
  not pay for the prologue of a tile.
* Flash attention: heads of 64 reach about 0.84 of heads of 128, short sequences less than long ones, and its backward about 0.8
  of the forward's rate (FlashAttention-2, arXiv 2307.08691, figures 4 to 6: 190 and 225 TFLOP/s at heads of 64 and 128,
  causal forward from 512 to 16k tokens, backward 170 to 196, all on A100). Without a causal mask each query sees all keys, and
  short sequences (windows of images) lose less: 252, 295, 308 and 312 TFLOP/s at 512, 1k, 2k and 4k tokens, heads of 64 on H100
  (github.com/Dao-AILab/flash-attention, pull request 2688).

`Device.matmul_fraction` and `attention_fraction` are what large shapes reach; these functions tell which share of it a shape
reaches.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.tensors.sizes import itemsize

_TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
"""Rows, columns, and which share of the largest tile's rate a kernel with that tile reaches at best."""

_INNER = 64
"""Elements of the inner dimension that take as long as the prologue and the store of a tile."""

_ROW = 16
"""Bytes at whose multiples a row must begin."""

_HEAD = 30
_SEQUENCE = 300
_WHOLE_SEQUENCE = 100
"""Tokens at which sequences reach half of the rate: under a causal mask or a band, and without."""
ATTENTION_BACKWARD = 0.8


@lru_cache(maxsize=65536)
def product_efficiency(count: int, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Share of the rate of large products that `count` products ``[m, k] x [k, n]`` reach; 1 where tiles do not matter (CPU)."""
    if not multiprocessors or min(count, m, n, k) < 1:
        return 1.0
    best = 0.0
    for rows, columns, share in _TILES:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        waves = ceil(tiles / multiprocessors)
        best = max(best, share * count * m * n / (waves * multiprocessors * rows * columns))
    return best * k / (k + _INNER)


@lru_cache(maxsize=4096)
def attention_efficiency(queries: int, head: int, backward: bool, whole: bool = False) -> float:
    """Share of the rate of long sequences and heads of 128. `whole`: every query sees all keys."""
    half = _WHOLE_SEQUENCE if whole else _SEQUENCE
    shape = (head / (head + _HEAD)) * (128 + _HEAD) / 128 * queries / (queries + half)
    return shape * (ATTENTION_BACKWARD if backward else 1.0)


def product_dtype(device: Device, dtype: str, n: int, k: int) -> str:
    """The dtype at whose rate a batched product computes: tensor cores want rows that begin at multiples of 16 bytes (NVIDIA,
    Mixed Precision Training guide: multiples of 8 half-precision elements), else the vector units do it. Heads of 108 make a
    whole step a third slower than heads of 144 (BigScience, tr11 chronicles-prequel, NHEADS comparison)."""
    size = itemsize(dtype)
    if not device.multiprocessors or size >= 4 or (n * size % _ROW == 0 and k * size % _ROW == 0):
        return dtype
    return "float32"


def product_seconds(device: Device, dtype: str, count: int, m: int, n: int, k: int) -> float:
    """``2 count m n k / (peak x fraction x efficiency)``."""
    rate = device.product_flops_per_second(dtype)
    return 2.0 * count * m * n * k / (rate * product_efficiency(count, m, n, k, device.multiprocessors))


def group_flops_per_second(device: Device, dtype: str, product: tuple[int, int, int, int] | None) -> float:
    """The rate of convolutions. With groups each is a small product (`flops.group_product`): in tiles, or on the vector
    units (at the rate of float32), whichever is faster."""
    rate = device.product_flops_per_second(dtype)
    if product is None:
        return rate
    return max(rate * product_efficiency(*product, device.multiprocessors), min(rate, device.product_flops_per_second("float32")))


def attention_seconds(
    device: Device, dtype: str, flops: float, queries: int, head: int, backward: bool, whole: bool = False
) -> float:
    """``FLOPs / (peak x fraction x efficiency)``; on a CPU without the shape's share."""
    rate = device.peak_flops_per_second(dtype) * device.attention_fraction
    share = attention_efficiency(queries, head, backward, whole) if device.multiprocessors else 1.0
    return flops / (rate * share)


TRANSCENDENTAL_BACKWARD = 2.0
"""Seconds of a transcendental operation's backward over its forward: it computes the function and its derivative."""


def operation_seconds(device: Device, arithmetic_seconds: float, memory_seconds: float, kernels: int) -> float:
    """The slower of arithmetic and memory, and at least the launches; on a CPU, which starts nothing while it computes, they
    add."""
    launches, work = kernels * device.launch_seconds, max(arithmetic_seconds, memory_seconds)
    return launches + work if device.kind == "cpu" else max(work, launches)


def streaming_seconds(device: Device, accessed_bytes: float) -> float:
    """``bytes / (bandwidth x fraction)``."""
    return accessed_bytes / (device.bandwidth_bytes_per_second * device.bandwidth_fraction)
