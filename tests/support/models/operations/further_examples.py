"""Examples of operations on images, spectra and sequences, and of those with complex numbers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from autopar.ir.graph import DType
from support.models.operation_examples import TensorSpec, i, m, p, t, u

OPTIONAL = ("bitsandbytes.dequantize_4bit",)
"""Operations of packages that the tests do not need, which are examples where these are installed."""
Example = tuple[str, tuple[Any, ...], dict[str, Any]]


def z(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "complex128")


def further_operations() -> Iterator[Example]:
    """(op, arguments, keyword arguments)."""
    for op in ["sgn", "sinc", "i0", "signbit", "frac", "rad2deg", "deg2rad", "positive", "fill.Scalar", "threshold"]:
        more: tuple[Any, ...] = (0.5,) if op == "fill.Scalar" else (0.1, 2.0) if op == "threshold" else ()
        yield f"aten.{op}", (t(8, 4), *more), {}
    for op in ["digamma", "lgamma"]:
        yield f"aten.{op}", (p(8, 4),), {}
    yield "aten.erfinv", (u(8, 4),), {}
    for op in ["hypot", "logaddexp", "logaddexp2", "nextafter", "polar", "complex"]:
        yield f"aten.{op}", (p(4, 8), p(4, 8)), {}
        yield f"aten.{op}", (p(4, 1, 8), p(4, 1)), {}
    for op in ["bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor"]:
        yield f"aten.{op}", (i(5, 4, 8), i(3, 4, 8)), {}
    for op in ["real", "imag", "angle", "_conj", "resolve_conj", "conj_physical", "view_as_real"]:
        yield f"aten.{op}", (z(4, 8),), {}
    yield "aten._prelu_kernel", (t(4, 8), t(1, 8)), {}
    yield "aten.view_as_complex", (t(4, 8, 2),), {}
    yield "aten.mul.Tensor", (z(4, 8), z(8)), {}
    for dtype in ("float32", "int16", "complex64"):  # as many elements, twice as many, half as many
        yield "aten.view.dtype", (TensorSpec((4, 8), "int32", 99), DType(dtype)), {}
    yield "aten._fft_r2c", (t(4, 8, 6), (2,), 0, True), {}
    yield "aten._fft_c2r", (z(4, 8, 4), (2,), 0, 6), {}
    yield "aten._fft_c2c", (z(4, 8, 6), (0, 2), 0, True), {}
    yield from _images()
    yield from _sequences()
    if find_spec("bitsandbytes") is not None:
        yield from _quantized()


def _quantized() -> Iterator[Example]:
    import bitsandbytes  # noqa: F401 (its operators are registered)

    packed = TensorSpec((4, 64), "uint8", 256)
    for block in (32, 64):
        scales = TensorSpec((4, 128 // block), "float32", within=(0.5, 3.0))
        yield OPTIONAL[0], (packed, scales, block, "nf4", (4, 128), DType("float32")), {}


def _images() -> Iterator[Example]:
    volume, image, line = t(4, 8, 6, 6, 6), t(4, 8, 6, 6), t(4, 8, 6)
    yield "aten.max_pool3d", (volume, (2, 2, 2)), {}
    yield "aten.max_pool3d_with_indices", (volume, (2, 2, 2)), {}
    yield "aten.max_pool1d_with_indices", (line, (2,)), {}
    yield "aten.avg_pool3d", (volume, (2, 2, 2)), {}
    yield "aten.adaptive_avg_pool3d", (volume, (2, 2, 2)), {}
    yield "aten._adaptive_avg_pool3d", (volume, (2, 2, 2)), {}
    for op, x, size in (("1d", line, (3,)), ("2d", image, (3, 3)), ("3d", volume, (3, 3, 3))):
        yield f"aten.adaptive_max_pool{op}", (x, size), {}
    yield "aten.upsample_nearest1d", (line, (12,)), {}
    yield "aten.upsample_linear1d", (line, (12,), False), {}
    yield "aten.upsample_nearest3d", (volume, (12, 12, 12)), {}
    yield "aten.upsample_trilinear3d", (volume, (12, 12, 12), False), {}
    for kind in ("reflection", "replication"):
        yield f"aten.{kind}_pad1d", (line, (1, 2)), {}
        yield f"aten.{kind}_pad2d", (image, (1, 2, 0, 0)), {}
        yield f"aten.{kind}_pad3d", (volume, (1, 1, 1, 1, 0, 1)), {}
    yield "aten.im2col", (image, (2, 2), (1, 1), (0, 0), (2, 2)), {}
    yield "aten.col2im", (t(4, 8, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2)), {}
    yield "aten.unfold", (t(4, 12, 8), 1, 4, 2), {}
    yield "aten.grid_sampler", (image, TensorSpec((4, 4, 8, 2), within=(-0.9, 0.9)), 0, 0, False), {}
    yield "aten.grid_sampler_2d", (image, TensorSpec((4, 4, 8, 2), within=(-0.9, 0.9)), 0, 0, False), {}
    yield "aten.grid_sampler_3d", (volume, TensorSpec((4, 4, 4, 4, 3), within=(-0.9, 0.9)), 0, 0, False), {}
    yield "aten.instance_norm", (image, t(8), t(8), None, None, True, 0.1, 1e-5, False), {}
    yield "aten.instance_norm", (image, None, None, None, None, True, 0.1, 1e-5, False), {}
    yield "aten.diagonal", (t(4, 6, 8, 6), 1, 1, 3), {}


def _sequences() -> Iterator[Example]:
    for first in (True, False):
        x = t(4, 6, 8) if first else t(6, 4, 8)
        for op, gates, states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):
            h: Any = (t(1, 4, 5), t(1, 4, 5)) if states == 2 else t(1, 4, 5)
            weights = (t(5 * gates, 8), t(5 * gates, 5), t(5 * gates), t(5 * gates))
            yield f"aten.{op}.input", (x, h, weights, True, 1, 0.0, True, False, first), {}
    for op in ("cdist", "_cdist_forward"):
        yield f"aten.{op}", (t(4, 8, 3), t(4, 4, 3), 2.0, None), {}
    yield "aten._euclidean_dist", (t(8, 3), t(4, 3)), {}
    for op in ("index_put", "_unsafe_index_put"):
        yield f"aten.{op}", (t(4, 6, 8), ((i(4, 3)), (i(6, 3))), t(3, 8)), {}
    yield "aten.index_put", (t(6, 4, 8), (i(6, 3),), t(), True), {}
    yield "aten.index_put", (t(6, 4, 8), (m(6, 4),), t()), {}
    yield "aten.index_put", (t(6, 4, 8), (m(6, 4), i(8, 1)), t()), {}
    yield "aten.argsort", (t(4, 8, 6), -1), {}
    yield "aten.argsort.stable", (t(4, 8, 6),), {"stable": True, "dim": 0}
    yield "aten.scatter_reduce.two", (t(4, 8, 6), 2, i(6, 4, 8, 3), t(4, 8, 3), "amax"), {}
    yield "aten.masked_fill.Scalar", (z(4, 8), m(8), 0.5), {}
