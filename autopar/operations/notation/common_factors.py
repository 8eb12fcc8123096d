"""The common factors of two shapes: how a reshape views one shape as the other."""

from __future__ import annotations

import sympy

from autopar.ir.dims import Dim, Shape, as_dim, as_sympy


def _quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """``a / b`` where it is a whole number for every batch, else None."""
    ratio = sympy.cancel(a / b)
    if not ratio.is_polynomial():
        return None
    symbols = sorted(ratio.free_symbols, key=str)
    coefficients = sympy.Poly(ratio, *symbols).coeffs() if symbols else [ratio]
    return ratio if all(item.is_Integer for item in coefficients) else None


def common_factors(left: Shape, right: Shape) -> tuple[list[list[int]], list[list[int]], list[Dim]]:
    """Splits both shapes into the same sequence of factors, row-major.

    Returns for each side and dimension the indices of its factors, and the factors' sizes. Dimensions without common factors
    (6 x 4 read as 4 x 6) and those of size 1 get none.
    """
    groups: tuple[list[list[int]], list[list[int]]] = ([[] for _ in left], [[] for _ in right])
    sizes: list[Dim] = []
    for dims in _equal_products(left, right):
        found = _refine([[as_sympy(side[dim]) for dim in part] for side, part in zip((left, right), dims, strict=True)])
        if found is None:
            continue
        terms, extents = found
        for group, part, side_terms in zip(groups, dims, terms, strict=True):
            for dim, term in zip(part, side_terms, strict=True):
                group[dim] = [len(sizes) + index for index in term]
        sizes += extents
    return *groups, sizes


def _equal_products(left: Shape, right: Shape) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions (those of size 1 left out) on both sides that hold equally many elements."""
    sides = [[dim for dim, size in enumerate(shape) if size != 1] for shape in (left, right)]
    shapes, at = (left, right), [0, 0]
    runs: list[tuple[list[int], list[int]]] = []
    while at[0] < len(sides[0]) and at[1] < len(sides[1]):
        begin = list(at)
        products = [sympy.Integer(1), sympy.Integer(1)]
        while True:
            side = 0 if at[0] == begin[0] or _large(products[0]) < _large(products[1]) else 1
            if at[1] == begin[1] and at[0] > begin[0]:
                side = 1
            if at[side] == len(sides[side]):
                return runs
            products[side] = sympy.expand(products[side] * as_sympy(shapes[side][sides[side][at[side]]]))
            at[side] += 1
            if products[0] == products[1]:
                break
        runs.append((sides[0][begin[0] : at[0]], sides[1][begin[1] : at[1]]))
    return runs


def _large(product: sympy.Expr) -> int:
    """The size at a large batch, to compare."""
    return int(product.subs({symbol: 1_000_003 for symbol in product.free_symbols}))


def _refine(sides: list[list[sympy.Expr]]) -> tuple[list[list[list[int]]], list[Dim]] | None:
    """Common factors of two runs with equal products, major first; None where one dimension divides neither way."""
    terms: list[list[list[int]]] = [[[] for _ in side] for side in sides]
    at, rest = [0, 0], [sides[0][0], sides[1][0]]
    sizes: list[Dim] = []
    while True:
        small = 0 if _quotient(rest[1], rest[0]) is not None else 1
        ratio = _quotient(rest[1 - small], rest[small])
        if ratio is None:
            return None
        for side in (0, 1):
            terms[side][at[side]].append(len(sizes))
        sizes.append(as_dim(rest[small]))
        rest[1 - small], rest[small] = ratio, sympy.Integer(1)
        for side in (0, 1):
            if rest[side] == 1 and at[side] + 1 < len(sides[side]):
                at[side] += 1
                rest[side] = sides[side][at[side]]
        if rest[0] == 1 and rest[1] == 1:
            return terms, sizes
