"""Grouped matrix products: consecutive rows, each group with its own matrix; rows ``bounds[i - 1]`` to ``bounds[i]`` belong to
matrix i.

If torch has a kernel for all groups at once it is used, else there is one product for each matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..compat.autograd import has_data

_ALIGNED_BYTES = 16
_CPU = (torch.float32, torch.bfloat16, torch.float16)
_CUDA = (torch.bfloat16,)


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """``[n, a] x [E, a, b] -> [n, b]``."""
    count, width = rows.shape[0], matrices.shape[2]
    if count == 0 or not has_data(rows):
        return rows.new_empty(count, width)
    if _one_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=_offsets(bounds, rows))
    out = rows.new_empty(count, width)
    for (start, end), matrix in zip(_row_ranges(bounds), matrices, strict=True):
        if start < end:
            torch.mm(rows[start:end], matrix, out=out[start:end])
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """``[n, a], [n, b] -> [E, a, b]``: ``left^T right`` over the rows of each matrix."""
    shape = (len(bounds), left.shape[1], right.shape[1])
    if left.shape[0] == 0:
        return left.new_zeros(shape)
    if not has_data(left):
        return left.new_empty(shape)
    if _one_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=_offsets(bounds, left))
    out = left.new_empty(shape)
    for index, (start, end) in enumerate(_row_ranges(bounds)):
        torch.mm(left[start:end].t(), right[start:end], out=out[index])
    return out


def grouped_sum(rows: torch.Tensor, matrix_of_row: torch.Tensor, count: int) -> torch.Tensor:
    """``[n, a] -> [E, a]``: the sum of each matrix's rows, always in the same order."""
    every = torch.arange(count, device=rows.device).unsqueeze(1)
    return (every == matrix_of_row).to(rows.dtype) @ rows


def _row_ranges(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *bounds[:-1]), bounds, strict=True))


def _offsets(bounds: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32).to(like.device, non_blocking=True)


def _one_kernel(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether torch's grouped product takes both: seen on 2.13.0; needs compute capability 8 or more, and aligned rows."""
    if left.dtype != right.dtype or left.device != right.device or not hasattr(F, "grouped_mm"):
        return False
    if left.is_cuda and (left.dtype not in _CUDA or torch.cuda.get_device_capability(left.device)[0] < 8):
        return False
    if not left.is_cuda and (left.device.type != "cpu" or left.dtype not in _CPU):
        return False
    return _aligned(left) and _aligned(right)


def _aligned(x: torch.Tensor) -> bool:
    strides = sorted(x.stride()[-2:])
    others = (*strides[1:], *x.stride()[:-2])
    return (
        strides[0] == 1
        and all(stride and stride * x.element_size() % _ALIGNED_BYTES == 0 for stride in others)
        and (x.data_ptr() % _ALIGNED_BYTES == 0)
    )
