"""Sizes that may depend on the batch: an int, or the text of an expression in ``B`` such as ``16*B``.

``B`` is the size of the batch dimension of the inputs: in a captured graph that of the global batch, in a lowered one that of one
data-parallel rank (and micro-batch).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import sympy

from autopar.ir.size_grammar import parse_size

Dim = int | str
Shape = tuple[Dim, ...]

BATCH = "B"


@lru_cache(maxsize=4096)
def _expression(dim: str) -> sympy.Expr:
    return parse_size(dim)


def as_dim(expression: sympy.Expr | int) -> Dim:
    """An int where the expression is one, else its text."""
    expression = sympy.sympify(expression)
    return int(expression) if expression.is_Integer else str(sympy.expand(expression))


def as_sympy(dim: Dim) -> sympy.Expr:
    """A size as a sympy expression."""
    return sympy.Integer(dim) if isinstance(dim, int) else _expression(dim)


@lru_cache(maxsize=65536)
def size_at(dim: Dim, batch: int) -> int:
    """The size at batch `batch`."""
    if isinstance(dim, int):
        return dim
    result = _expression(dim).subs(sympy.Symbol(BATCH, integer=True, positive=True), batch)
    if not result.is_Integer:
        raise ValueError(f"size {dim} is not a whole number at batch {batch}")
    return int(result)


def shape_at(shape: Iterable[Dim], batch: int) -> tuple[int, ...]:
    """A whole shape at batch `batch`."""
    return _shape_at(tuple(shape), batch)


@lru_cache(maxsize=65536)
def _shape_at(shape: Shape, batch: int) -> tuple[int, ...]:
    return tuple(size_at(dim, batch) for dim in shape)


def numel(shape: Iterable[Dim], batch: int) -> int:
    """The number of elements at batch `batch`."""
    return prod(shape_at(shape, batch))


def has_batch(dim: Dim) -> bool:
    """Whether the size grows with the batch."""
    return isinstance(dim, str)


@lru_cache(maxsize=65536)
def divisible(dim: Dim, by: int) -> bool:
    """Whether `by` divides the size. For a size in ``B``, the batch itself may supply the factor, which is decided where B is
    known, but not that of what is added to it: ``4*B + 2`` may divide by 2, ``B + 3`` does not where ``B`` does."""
    if isinstance(dim, int):
        return dim % by == 0
    expression = _expression(dim)
    added = expression.subs(dict.fromkeys(expression.free_symbols, 0))
    return bool(added.is_Integer) and int(added) % by == 0


@lru_cache(maxsize=65536)
def divide(dim: Dim, by: int) -> Dim:
    """``dim / by``. ValueError where an int does not divide."""
    if isinstance(dim, int):
        if dim % by:
            raise ValueError(f"a dimension of size {dim} does not divide by {by}")
        return dim // by
    return as_dim(_expression(dim) / by)
