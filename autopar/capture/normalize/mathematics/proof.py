"""Whether a region is a function of torch: both are executed in float64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.capture.constants import concrete, kwargs_of, resolve
from autopar.capture.normalize.mathematics.regions import MERGE, WrittenRegion
from autopar.operations.pointwise import CAST

SCALES = (0.0, 1e-6, 1e-3, 1.0, 30.0)
"""Magnitudes of the rows of x: zero, where an epsilon of any size tells, next to that of a norm, and out to where an activation
is flat."""
RELATIVE, ABSOLUTE = 1e-10, 1e-12

Function = Callable[..., Tensor]


def equal(region: WrittenRegion, functions: list[Function]) -> int | None:
    """Return the place of the first function that equals the region in its operands, None where none does."""
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
        operands = _operands(region)
        expected = _derivatives(lambda *tensors: _run(region, tensors), operands)
        for place, function in enumerate(functions if expected else ()):
            found = _derivatives(function, operands)
            if found and all(map(_close, found, expected)):
                return place
    return None


def _close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, RELATIVE, ABSOLUTE)


def _operands(region: WrittenRegion) -> tuple[Tensor, ...]:
    """Random operands; the rows of x have the sizes of `SCALES`."""
    draws = torch.Generator().manual_seed(0)
    leading = len(SCALES), *(2,) * (len(region.x.shape) - 2)
    shapes = [(*leading, region.x.shape[-1])]
    for value in region.others:
        *before, last = value.shape
        rows = leading[len(leading) - len(before) :]
        shapes.append((*(1 if own == 1 else size for own, size in zip(before, rows, strict=True)), last))
    x, *others = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes)  # type: ignore[arg-type]
    x *= torch.tensor(SCALES, dtype=torch.float64).view(-1, *(1,) * len(leading))
    return tuple(tensor.requires_grad_() for tensor in (x, *others))


def _derivatives(function: Function, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The value, and the gradients of a random combination of its elements; nothing where it has no value at these sizes."""
    try:
        value = function(*operands)
    except (RuntimeError, IndexError):
        return ()
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return value.detach(), *torch.autograd.grad(value, operands, weights, materialize_grads=True)


def _run(region: WrittenRegion, operands: tuple[Tensor, ...]) -> Tensor:
    tensors = dict(zip((value.name for value in (region.x, *region.others)), operands, strict=True))
    for node in region.nodes:
        if node.op == CAST:  # to more digits than x has, and back
            results: Any = tensors[node.operands()[0]]
        elif node.op == MERGE:  # its sizes are those of the graph
            results = tensors[node.operands()[0]].flatten(-2)
        else:
            args = (concrete(arg, tensors, len(SCALES)) for arg in node.args)
            results = resolve(node.op)(*args, **kwargs_of(node, tensors, len(SCALES)))
        several = results if isinstance(results, (tuple, list)) else (results,)
        tensors.update(zip((value.name for value in node.outputs), several, strict=True))
    return tensors[region.root.name]
