"""The grammar of sizes: integers, ``B``, ``S``, ``+ - * / // **``, parentheses and ``floor(...)``, as Python reads them.

A size may come from a file, and ``sympy.sympify`` evaluates what it reads: here the text is only parsed, and of the tree nothing
but this is taken. Texts, numbers, exponents, degrees and parentheses are bounded, so that no text takes long.
"""

from __future__ import annotations

import ast
import re

import sympy

SYMBOLS = ("B", "S")
"""Batch and sequence."""

LONGEST = 200
LARGEST = 2**63
MOST_DEGREE = 32
MOST_PARENTHESES = 32

_LETTERS = re.compile(r"(?:\d+|floor|[BS]|[-+*/() ])*", re.ASCII)
_SIGNS = re.compile(r"[-+] *[-+]")


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
