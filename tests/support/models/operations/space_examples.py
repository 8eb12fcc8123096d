"""Examples of operations on images that are large enough to be cut along a dimension of space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.models.operation_examples import TensorSpec, t

Example = tuple[str, tuple[Any, ...], dict[str, Any]]


def image(dims: int, channels: int = 4, **longest: int) -> TensorSpec:
    """``[2, channels, ...]`` of 4096 pixels; `rows` and `columns` are other lengths."""
    shape = {1: (4096,), 2: (longest.get("rows", 64), longest.get("columns", 64)), 3: (16, 16, 16)}[dims]
    return t(2, channels, *shape)


def kernel(out: int, within: int, dims: int, size: int = 3) -> TensorSpec:
    return t(out, within, *(size,) * dims)


def _convolutions() -> Iterator[Example]:
    for dims, form in ((1, ""), (2, ".input"), (3, ".input")):
        ones, op = (1,) * dims, f"aten.conv{dims}d"
        yield op, (image(dims), kernel(6, 4, dims), t(6), ones, ones), {}
        yield op, (image(dims), kernel(6, 4, dims), t(6), (2,) * dims, ones), {}
        yield op, (image(dims), kernel(4, 1, dims), None, ones, (2,) * dims, (2,) * dims, 4), {}
        yield op, (image(dims), kernel(6, 2, dims, 2), t(6), (2,) * dims, (0,) * dims, ones, 2), {}
        yield f"aten.conv_transpose{dims}d{form}", (image(dims), kernel(4, 3, dims, 2), t(3), (2,) * dims), {}
        yield f"aten.conv_transpose{dims}d{form}", (image(dims), kernel(4, 3, dims, 4), t(3), (2,) * dims, ones), {}
    wide = image(2, columns=96)
    yield "aten.conv2d", (wide, kernel(4, 4, 2, 7), t(4), (2, 2), (3, 3)), {}
    yield "aten.conv2d", (wide, kernel(4, 4, 2, 4), t(4), (2, 2), (1, 1)), {}
    yield "aten.conv2d", (image(2), t(4, 4, 5, 3), t(4), (1, 1), (2, 1)), {}
    yield "aten.conv2d", (image(2), kernel(4, 4, 2, 1), None, (2, 2)), {}
    yield "aten.conv2d", (image(2), kernel(4, 4, 2), None, (4, 4), (1, 1)), {}
    yield "aten.conv2d.padding", (image(2), t(4, 4, 4, 3), t(4), (1, 1), "same", (3, 2)), {}
    yield "aten.conv2d", (image(2, rows=128), kernel(4, 4, 2, 9), None, (1, 1), (16, 16), (4, 4)), {}
    yield "aten.conv_transpose2d.input", (image(2), kernel(4, 2, 2), t(4), (2, 2), (1, 1), (1, 1), 2), {}
    yield "aten.conv_transpose2d.input", (wide, kernel(4, 2, 2, 5), None, (1, 1), (2, 2), (0, 0), 1), {}
    yield "aten.conv_transpose2d.input", (image(2), kernel(4, 2, 2), None, (1, 1), (2, 2), (0, 0), 1, (2, 2)), {}


def _pools() -> Iterator[Example]:
    for dims in (1, 2, 3):
        two = (2,) * dims
        yield f"aten.max_pool{dims}d", (image(dims), two), {}
        yield f"aten.max_pool{dims}d", (image(dims), (3,) * dims, two, (1,) * dims), {}
        yield f"aten.avg_pool{dims}d", (image(dims), two), {}
        yield f"aten.avg_pool{dims}d", (image(dims), (3,) * dims, two, (1,) * dims), {}
    yield "aten.max_pool2d", (image(2), (2, 2), (1, 1), (1, 1), (2, 2)), {}
    yield "aten.avg_pool2d", (image(2), (4, 3), (2, 1), (1, 1)), {}
    yield "aten.avg_pool2d", (image(2), (3, 3), (2, 2), (1, 1), False, False), {}
    yield "aten.max_pool2d", (image(2), (3, 3), (2, 2), (1, 1), (1, 1), True), {}


def _others() -> Iterator[Example]:
    for dims, kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
        yield f"aten.upsample_nearest{dims}d.vec", (image(dims), None, (2.0,) * dims), {}
        yield f"aten.upsample_{kind}{dims}d.vec", (image(dims), None, False, (2.0,) * dims), {}
    yield "aten.upsample_nearest2d.vec", (image(2), (128, 192), None), {}
    yield "aten.upsample_bilinear2d.vec", (image(2), (192, 100), False, None), {}
    yield "aten.upsample_bilinear2d.vec", (image(2), None, False, (4.0, 1.5)), {}
    yield "aten.upsample_bilinear2d.vec", (image(2), (128, 128), True, None), {}
    yield "aten.upsample_bilinear2d.vec", (image(2), (192, 100), True, None), {}
    yield "aten.upsample_trilinear3d.vec", (image(3), None, True, (2.0, 2.0, 1.5)), {}
    yield "aten.upsample_bilinear2d.vec", (image(2), (100, 100), False, None), {}
    for dims in (1, 2, 3):
        yield "aten.group_norm", (image(dims), 2, t(4), t(4), 1e-5, False), {}
    yield "aten.group_norm", (image(2), 4), {}
    yield "aten.instance_norm", (image(2), t(4), t(4), None, None, True, 0.1, 1e-5, False), {}
    yield "aten.instance_norm", (image(1), None, None, None, None, True, 0.1, 1e-5, False), {}


def space_operations() -> tuple[Example, ...]:
    """(op, arguments, keyword arguments)."""
    return *_convolutions(), *_pools(), *_others()
