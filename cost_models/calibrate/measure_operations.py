"""Operations that a calibration times: matrix products, attention, streaming, small kernels, copies to and from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from autopar.cost_models.calibrate.measure import PACKED, PACKED_MATRICES, PACKED_ROWS

Operation = tuple[str, float, Callable[[], object]]
"""Name (``kind.what``), FLOPs or bytes, and a call. fit.py reads the names."""

CHAIN = 32
TRANSCENDENTAL_CHAIN = 8
UPDATED, UPDATE_PASSES = 16, 10.0
"""Tensors, and what `optimizer_named` counts of AdamW: two accesses a pass."""
LARGE_UPDATED = (2**20, 2**20, 2**20, 2**20, 2**22, 2**22, 2**22)
"""Numbers of the parameters of `_large_update`: some in tensors that the C library keeps when they are freed, most in larger
ones; together more than caches hold."""
FRESH = 2**24
"""Numbers of a tensor that is above the C library's mmap threshold, so that its pages are new each time."""


def operation_calls(device: torch.device, thorough: bool) -> Iterator[Operation]:
    """Yield the operations to time on `device`."""
    cuda = device.type == "cuda"
    main = torch.bfloat16 if cuda else torch.float32
    yield from _products(device, main, _shapes(cuda, thorough))
    others = (torch.float32, torch.float64, torch.float16) if cuda else (torch.bfloat16, torch.float64, torch.float16)
    for dtype in others:
        side = (4096 if dtype == torch.float16 else 2048) if cuda else 512 if dtype == torch.float64 else 192
        yield from _products(device, dtype, [(side, side, side)])
    if not cuda:
        yield from _packed_product()
    yield from _convolutions(device, main, thorough)
    yield from _attention(device, main, thorough)
    big = torch.ones(2**28 if cuda else 2**24, device=device)
    yield "stream.add", 8.0 * big.numel(), partial(torch.add, big, 1.0, out=big)
    few = torch.randn(2**22 if cuda else 2**18, device=device)
    yield "special.gelu", float(TRANSCENDENTAL_CHAIN * few.numel()), _transcendental(few)
    if not cuda:
        yield "launch.update", UPDATED * UPDATE_PASSES, _update()
        yield "pages.new", 4.0 * FRESH, lambda: torch.empty(FRESH).fill_(1.0)
        yield "pages.old", 4.0 * FRESH, partial(torch.ones(FRESH).fill_, 1.0)
        yield "update.adamw", 4.0 * 2 * UPDATE_PASSES * sum(LARGE_UPDATED), _large_update()
    yield "launch.chain", 2.0 * CHAIN, _chain(device)
    if cuda:
        host = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=device)
        yield "host.read", float(host.numel()), partial(there.copy_, host, non_blocking=True)
        yield "host.write", float(host.numel()), partial(host.copy_, there, non_blocking=True)


def _shapes(cuda: bool, thorough: bool) -> list[tuple[int, int, int]]:
    """Return (tokens, in, out) of square and of transformer layers."""
    if cuda:
        few = [(4096, 4096, 4096), (8192, 4096, 14336)]
        return [*few, (8192, 8192, 8192), (2048, 4096, 4096), (8192, 14336, 4096), (1024, 1024, 1024)] if thorough else few
    few = [(512, 512, 512), (256, 768, 768)]
    return [*few, (1024, 1024, 1024), (256, 768, 3072), (256, 3072, 768), (512, 256, 1024), (128, 128, 512)] if thorough else few


def _products(device: torch.device, dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> Iterator[Operation]:
    for m, k, n in shapes:
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
        out = torch.empty(m, n, dtype=dtype, device=device)
        name = f"gemm.{str(dtype).removeprefix('torch.')}.{m}x{k}x{n}"
        yield name, 2.0 * m * k * n, partial(torch.mm, a, b.t(), out=out)


def _packed_product() -> Iterator[Operation]:
    x, weights = torch.randn(PACKED_ROWS, PACKED), [torch.randn(PACKED, PACKED) for _ in range(PACKED_MATRICES)]
    out = torch.empty(PACKED_ROWS, PACKED)

    def call() -> object:
        for weight in weights:  # more than caches hold
            torch.mm(x, weight.t(), out=out)
        return out

    yield "packed_gemm", 4.0 * PACKED_MATRICES * (PACKED * PACKED + 2 * PACKED_ROWS * PACKED), call


def _convolutions(device: torch.device, dtype: torch.dtype, thorough: bool) -> Iterator[Operation]:
    """Yield forward and backward, three products of the forward's size, of kernels of 3 x 3 over square images."""
    shapes = ((8, 16, 16, 32), (8, 32, 64, 32), (8, 64, 64, 16)) if thorough else ((4, 32, 64, 16),)
    for count, inputs, outputs, side in shapes:
        count, inputs, outputs = (8 * count, 4 * inputs, 4 * outputs) if device.type == "cuda" else (count, inputs, outputs)
        image = torch.randn(count, inputs, side, side, device=device).to(dtype).requires_grad_()
        kernel = torch.randn(outputs, inputs, 3, 3, device=device).to(dtype).requires_grad_()
        grad = torch.ones(count, outputs, side, side, device=device, dtype=dtype)

        def both(image: torch.Tensor = image, kernel: torch.Tensor = kernel, grad: torch.Tensor = grad) -> object:
            return torch.autograd.grad(torch.nn.functional.conv2d(image, kernel, padding=1), (image, kernel), grad)

        flops = 3 * 2.0 * 9 * count * inputs * outputs * side * side
        yield f"convolution.{str(dtype).removeprefix('torch.')}.{count}x{inputs}x{outputs}x{side}", flops, both


def _attention(device: torch.device, dtype: torch.dtype, thorough: bool) -> Iterator[Operation]:
    """Yield forward and backward of attention: two and five products of ``2 b h s s d`` FLOPs; on CPUs with a causal mask too,
    which leaves half of them. (On GPUs compute/kernels.py knows what a mask costs.)"""
    lengths = ((2048, 8192) if thorough else (4096,)) if device.type == "cuda" else ((128, 512) if thorough else (256,))
    for length, causal in [(length, causal) for causal in (False, True) for length in lengths]:
        if causal and device.type == "cuda":
            continue
        heads, width = (32, 128) if device.type == "cuda" else (4, 64)
        q, k, v = (torch.randn(1, heads, length, width, device=device).to(dtype).requires_grad_() for _ in range(3))
        grad = torch.ones(1, heads, length, width, device=device, dtype=dtype)

        name = f"{'causal_' * causal}attention.{str(dtype).removeprefix('torch.')}.{length}"
        yield name, (7.0 if causal else 14.0) * heads * length * length * width, _attend(q, k, v, grad, causal)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool) -> Callable[[], object]:
    def call() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), grad)

    return call


def _transcendental(x: torch.Tensor) -> Callable[[], object]:
    """A chain of transcendental functions, forward and backward: as in a model all results are saved, in cold memory."""
    leaf, grad = x.requires_grad_(), torch.ones_like(x)

    def call() -> object:
        y = leaf
        for _ in range(TRANSCENDENTAL_CHAIN):
            y = torch.nn.functional.gelu(y)
        return torch.autograd.grad(y, leaf, grad)

    return call


def _update() -> Callable[[], object]:
    """AdamW on small parameters that are spread over all ranks, as a program's are: mostly dispatch of distributed tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    tensors = [DTensor.from_local(torch.ones(64), mesh, [Replicate()], run_check=False) for _ in range(2 * UPDATED)]
    parameters = [torch.nn.Parameter(each) for each in tensors[:UPDATED]]
    for parameter, gradient in zip(parameters, tensors[UPDATED:], strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters).step


def _large_update() -> Callable[[], object]:
    """AdamW on parameters of two sizes. Temporary results of the large one are new memory each time, which the C library has
    given back to the system and gets page by page again: that takes longer than to stream over memory that is there."""
    parameters = [torch.nn.Parameter(torch.ones(numbers)) for numbers in LARGE_UPDATED]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters).step


def _chain(device: torch.device) -> Callable[[], object]:
    """A chain of small operations, forward and backward: what one of them costs when it has nothing to do."""
    x = torch.ones(64, device=device, requires_grad=True)

    def call() -> object:
        y = x
        for _ in range(CHAIN):
            y = y * 1.0
        return torch.autograd.grad(y, x, torch.ones_like(y))

    return call
