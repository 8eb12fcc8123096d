"""Kernels that return the log-sum-exp on CUDA, against plain maths in float64."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import collectives as C
from autopar.runtime.ops.attention.merge import attend, attend_backward, plain_backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_part_of_a_row(dtype: torch.dtype, causal: bool, heads: tuple[int, int]) -> None:
    """The backward is given a log-sum-exp that is not the rectangle's own."""
    torch.manual_seed(0)
    shapes = [(2, heads[0], 256, 64), (2, heads[1], 256, 64), (2, heads[1], 256, 64), (2, heads[0], 256, 64)]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    out, lse = attend(q, k, v, bias=None, causal=causal, scale=0.125)
    exact = [x.double() for x in (q, k, v)]
    wanted, wanted_lse = attend(*exact, bias=None, causal=causal, scale=0.125)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=1e-3)
    more = wanted_lse + 0.5
    found = attend_backward(grad, q, k, v, out, more.float(), bias=None, causal=causal, scale=0.125)
    right = plain_backward(grad.double(), *exact, wanted, more, bias=None, causal=causal, scale=0.125)
    for a, b in zip(found, right[:3], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("window", [None, (100, -1), (64, 64)])
@pytest.mark.parametrize("masked", [False, True])
def test_windows(window: tuple[int, int] | None, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = (torch.rand(2, 1, 1, 512, device="cuda") < 0.9) if masked else None
    causal = window != (64, 64)
    found = C.attention(q, k, v, mask, 0.0, causal, window=window)
    exact = C.attention(*(x.double().cpu() for x in (q, k, v)), None if mask is None else mask.cpu(), 0.0, causal, window=window)
    torch.testing.assert_close(found.double().cpu(), exact, rtol=3e-2, atol=3e-2)
