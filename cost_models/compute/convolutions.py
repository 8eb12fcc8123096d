"""Seconds of convolutions: as large as they come, with groups, and with few channels on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

from autopar.cost_models.compute.kernels import VECTOR_DTYPE, product_efficiency
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.graph import Node
from autopar.operations.images.convolutions import convolution_groups
from autopar.operations.operation import Sizes
from autopar.operations.table import operation


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
