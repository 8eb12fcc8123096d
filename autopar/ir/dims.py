"""Sizes that may depend on the batch: an int, or the text of an expression in ``B`` such as ``16*B``.

``B`` stands for the size of the batch dimension of the inputs *at the place where it is read*: in a captured graph the
global batch, in a rewritten one the batch of one data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import sympy

Dim = int | str
Shape = tuple[Dim, ...]

BATCH = "B"


@lru_cache(maxsize=4096)
def _expression(dim: str) -> sympy.Expr:
    return sympy.sympify(dim, locals={BATCH: sympy.Symbol(BATCH, integer=True, positive=True)})


def simplify(expression: sympy.Expr | int) -> Dim:
    """An int where the expression is one, else its text."""
    expression = sympy.sympify(expression)
    return int(expression) if expression.is_Integer else str(sympy.expand(expression))


def expression(dim: Dim) -> sympy.Expr:
    """The sympy form of a size."""
    return sympy.Integer(dim) if isinstance(dim, int) else _expression(dim)


@lru_cache(maxsize=65536)
def value(dim: Dim, batch: int) -> int:
    """The size at batch `batch`."""
    if isinstance(dim, int):
        return dim
    result = _expression(dim).subs(sympy.Symbol(BATCH, integer=True, positive=True), batch)
    if not result.is_Integer:
        raise ValueError(f"size {dim} is not a whole number at batch {batch}")
    return int(result)


def values(shape: Iterable[Dim], batch: int) -> tuple[int, ...]:
    """A whole shape at batch `batch`."""
    return tuple(value(dim, batch) for dim in shape)


def numel(shape: Iterable[Dim], batch: int) -> int:
    """The number of elements at batch `batch`."""
    return prod(values(shape, batch))


def has_batch(dim: Dim) -> bool:
    """Whether the size grows with the batch."""
    return isinstance(dim, str)


@lru_cache(maxsize=65536)
def divisible(dim: Dim, by: int) -> bool:
    """Whether `by` divides the size. For a size in ``B``, the batch itself may supply the factor: decided where B is known."""
    return True if isinstance(dim, str) else dim % by == 0


@lru_cache(maxsize=65536)
def divide(dim: Dim, by: int) -> Dim:
    """``dim / by``. ValueError where an int does not divide."""
    if isinstance(dim, int):
        if dim % by:
            raise ValueError(f"a dimension of size {dim} does not divide by {by}")
        return dim // by
    return simplify(_expression(dim) / by)
