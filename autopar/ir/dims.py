"""Sizes that may depend on the batch: an int, or the text of an expression in ``B`` such as ``16*B``.

``B`` is the size of the batch dimension of the inputs: in a captured graph that of the global batch, in a lowered one that of one
data-parallel rank (and micro-batch).

A text may come from a file, and ``sympy.sympify`` evaluates what it reads: here Python parses it, and of its tree nothing but
integers, ``B``, ``S``, ``+ - * / // **``, parentheses and ``floor(...)`` is taken. Texts, numbers, exponents, degrees and
parentheses are bounded, so that none takes long.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from math import prod

import sympy

Dim = int | str
Shape = tuple[Dim, ...]

BATCH = "B"
SYMBOLS = ("B", "S")
"""Batch and sequence."""

LONGEST = 200
LARGEST = 2**63
MOST_DEGREE = 32
MOST_PARENTHESES = 32

_LETTERS = re.compile(r"(?:\d+|floor|[BS]|[-+*/() ])*", re.ASCII)
_SIGNS = re.compile(r"[-+] *[-+]")


def as_dim(expression: sympy.Expr | int) -> Dim:
    """An int where the expression is one, else its text."""
    expression = sympy.sympify(expression)
    return int(expression) if expression.is_Integer else str(sympy.expand(expression))


def as_sympy(dim: Dim) -> sympy.Expr:
    """A size as a sympy expression."""
    return sympy.Integer(dim) if isinstance(dim, int) else parse_size(dim)


@lru_cache(maxsize=65536)
def size_at(dim: Dim, batch: int) -> int:
    """The size at batch `batch`."""
    if isinstance(dim, int):
        return dim
    result = _value_at(dim, batch)
    if not result.is_Integer:
        raise ValueError(f"size {dim} is not a whole number at batch {batch}")
    return int(result)


def real_at(dim: Dim, batch: int) -> float:
    """The float at batch `batch` of an expression that need not be whole there."""
    return float(_value_at(dim, batch))


def _value_at(dim: Dim, batch: int) -> sympy.Expr:
    return as_sympy(dim).subs(sympy.Symbol(BATCH, integer=True, positive=True), batch)


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
    """Return whether the size grows with the batch."""
    return isinstance(dim, str)


@lru_cache(maxsize=65536)
def divisible(dim: Dim, by: int) -> bool:
    """Whether `by` divides the size. For a size in ``B``, the batch itself may supply the factor, which is decided where B is
    known, but not that of what is added to it: ``4*B + 2`` may divide by 2, ``B + 3`` does not where ``B`` does."""
    if isinstance(dim, int):
        return dim % by == 0
    expression = parse_size(dim)
    added = expression.subs(dict.fromkeys(expression.free_symbols, 0))
    return bool(added.is_Integer) and int(added) % by == 0


@lru_cache(maxsize=65536)
def divide(dim: Dim, by: int) -> Dim:
    """``dim / by``. ValueError where an int does not divide."""
    if isinstance(dim, int):
        if dim % by:
            raise ValueError(f"a dimension of size {dim} does not divide by {by}")
        return dim // by
    return as_dim(parse_size(dim) / by)


# -- the grammar


@lru_cache(maxsize=4096)
def parse_size(text: str) -> sympy.Expr:
    """Return the expression that the text writes. ValueError, one line, on any other text."""
    if len(text) > LONGEST:
        raise ValueError(f"{text[:30]!r}... is no size: it has {len(text)} characters, at most {LONGEST} are read")
    try:
        if not _LETTERS.fullmatch(text) or _SIGNS.search(text) or text.count("(") > MOST_PARENTHESES:
            raise ValueError("it has other characters, signs beside each other, or too many parentheses")
        return _read(ast.parse(text.strip(), mode="eval").body)[0]
    except SyntaxError:
        reason = "it is no expression"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{text!r} is no size ({reason}): write integers, B, S, + - * // ** and parentheses")


def _read(node: ast.expr) -> tuple[sympy.Expr, int]:
    """Return an expression, and its degree in the symbols."""
    match node:
        case ast.Constant(int(number)) if number < LARGEST:
            return sympy.Integer(number), 0
        case ast.Name(name) if name in SYMBOLS:
            return sympy.Symbol(name, integer=True, positive=True), 1
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            value, degree = _read(operand)
            return (-value if isinstance(sign, ast.USub) else value), degree
        case ast.Call(ast.Name("floor"), [argument], []):
            value, degree = _read(argument)
            return sympy.floor(value), degree
        case ast.BinOp(base, ast.Pow(), ast.Constant(int(exponent))):
            value, degree = _read(base)
            if exponent > MOST_DEGREE or (value.is_Integer and abs(value) ** exponent >= LARGEST):
                raise ValueError("an exponent that large")
            return value**exponent, _bounded(degree * exponent)
        case ast.BinOp(left, op, right):
            return _combined(*_read(left), op, *_read(right))
    raise ValueError(f"{ast.unparse(node)[:20]} is none, or too large")


def _combined(a: sympy.Expr, degree: int, op: ast.operator, b: sympy.Expr, more: int) -> tuple[sympy.Expr, int]:
    match op:
        case ast.Add():
            return a + b, max(degree, more)
        case ast.Sub():
            return a - b, max(degree, more)
        case ast.Mult():
            return a * b, _bounded(degree + more)
        case ast.Div() | ast.FloorDiv() if b != 0:
            return (a / b if isinstance(op, ast.Div) else sympy.floor(a / b)), _bounded(degree + more)
    raise ValueError("a division by zero, or a power whose exponent is no number")


def _bounded(degree: int) -> int:
    if degree > MOST_DEGREE:
        raise ValueError(f"a degree above {MOST_DEGREE}")
    return degree
