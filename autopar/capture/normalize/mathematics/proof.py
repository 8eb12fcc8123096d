"""Whether a region is a function of torch: both are executed in float64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar.capture.evaluate import concrete, kwargs_of, resolve
from autopar.capture.normalize.mathematics.regions import WrittenRegion
from autopar.operations.pointwise import CAST

SCALES = (0.0, 1e-6, 1e-3, 1.0, 30.0)
"""Of the rows of x: at zero, where an epsilon of any size tells, next to that of a norm, and out to where an activation is
flat."""
RELATIVE, ABSOLUTE = 1e-10, 1e-12
ANY_LENGTH = 8
"""Of a last dimension that depends on the batch."""

Function = Callable[..., Tensor]


def equal(region: WrittenRegion, functions: list[Function]) -> int | None:
    """Return the place of the first function that equals the region in its operands, None where none does."""
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
        operands = _operands(region)
        try:
            expected = _derivatives(lambda *tensors: _run(region, tensors), operands)
        except (RuntimeError, IndexError):  # it has no value at these sizes
            return None
        for place, function in enumerate(functions):
            if all(map(_close, _derivatives(function, operands), expected)):
                return place
    return None


def _close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, RELATIVE, ABSOLUTE)


def _operands(region: WrittenRegion) -> tuple[Tensor, ...]:
    """Random operands; the rows of x have the sizes of `SCALES`."""
    draws = torch.Generator().manual_seed(0)
    length = region.x.shape[-1] if isinstance(region.x.shape[-1], int) else ANY_LENGTH
    x = torch.randn(len(SCALES), *(2,) * (len(region.x.shape) - 2), length, generator=draws, dtype=torch.float64)
    x *= torch.tensor(SCALES, dtype=torch.float64).view(-1, *(1,) * (x.dim() - 1))
    vectors = (torch.randn(length, generator=draws, dtype=torch.float64) for _ in region.vectors)
    return tuple(tensor.requires_grad_() for tensor in (x, *vectors))


def _derivatives(function: Function, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The value, and the gradients of a random combination of its elements."""
    value = function(*operands)
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return value.detach(), *torch.autograd.grad(value, operands, weights, materialize_grads=True)


def _run(region: WrittenRegion, operands: tuple[Tensor, ...]) -> Tensor:
    tensors = dict(zip((value.name for value in (region.x, *region.vectors)), operands, strict=True))
    for node in region.nodes:
        if node.op == CAST:  # to more digits than x has, and back
            tensors[node.name] = tensors[node.operands()[0]]
        else:
            args = (concrete(arg, tensors, len(SCALES)) for arg in node.args)
            tensors[node.name] = resolve(node.op)(*args, **kwargs_of(node, tensors, len(SCALES)))
    return tensors[region.root.name]
