"""The grammar of sizes, parsed by hand: a size may come from a file, and ``sympy.sympify`` evaluates what it reads.

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "//" | "/") factor)*
    factor  = ("+" | "-") factor | atom ["**" integer]
    atom    = integer | "B" | "S" | "(" sum ")" | "floor" "(" sum ")"

Texts, numbers, exponents, degrees and nesting are bounded, so that no text takes long.
"""

from __future__ import annotations

import re

import sympy

SYMBOLS = ("B", "S")
"""Batch and sequence."""

LONGEST = 200
LARGEST = 2**63
MOST_DEGREE = 32
DEEPEST = 20

_TOKEN = re.compile(r"\s*(\d+|floor|[BS]|\*\*|//|[-+*/()])", re.ASCII)


def parse_size(text: str) -> sympy.Expr:
    """The expression that the text writes. ValueError, one line, on any other text."""
    if len(text) > LONGEST:
        raise ValueError(f"{text[:30]!r}... is no size: it has {len(text)} characters, at most {LONGEST} are read")
    parser = _Parser(text)
    try:
        found, _ = parser.sum(0)
        if parser.at < len(parser.tokens):
            raise ValueError(f"{parser.tokens[parser.at]!r} is too much")
    except ValueError as error:
        raise ValueError(f"{text!r} is no size ({error}): write integers, B, S, + - * // ** and parentheses") from None
    return found


class _Parser:
    """Every method gives an expression and its degree in the symbols."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.at = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(f"{text!r} is no size: {text[position : position + 8]!r} is not known in one")
            self.tokens.append(match[1])
            position = match.end()

    def take(self, *wanted: str) -> str:
        """The next token where it is one of these, else nothing."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def sum(self, depth: int) -> tuple[sympy.Expr, int]:
        total, degree = self.product(depth)
        while sign := self.take("+", "-"):
            other, more = self.product(depth)
            total, degree = (total + other if sign == "+" else total - other), max(degree, more)
        return total, degree

    def product(self, depth: int) -> tuple[sympy.Expr, int]:
        total, degree = self.factor(depth)
        while sign := self.take("*", "//", "/"):
            other, more = self.factor(depth)
            if sign != "*" and other == 0:
                raise ValueError("a division by zero")
            total = total * other if sign == "*" else total / other if sign == "/" else sympy.floor(total / other)
            degree = _bounded(degree + more)
        return total, degree

    def factor(self, depth: int) -> tuple[sympy.Expr, int]:
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        if sign := self.take("+", "-"):
            value, degree = self.factor(depth + 1)
            return (value if sign == "+" else -value), degree
        value, degree = self.atom(depth)
        if self.take("**"):
            exponent = self.integer()
            if exponent > MOST_DEGREE or (value.is_Integer and abs(value) ** exponent >= LARGEST):
                raise ValueError("an exponent that large")
            return value**exponent, _bounded(degree * exponent)
        return value, degree

    def atom(self, depth: int) -> tuple[sympy.Expr, int]:
        if name := self.take(*SYMBOLS):
            return sympy.Symbol(name, integer=True, positive=True), 1
        floor = self.take("floor")
        if self.take("("):
            value, degree = self.sum(depth + 1)
            if not self.take(")"):
                raise ValueError("a parenthesis is not closed")
            return (sympy.floor(value) if floor else value), degree
        if floor:
            raise ValueError("floor needs parentheses")
        return sympy.Integer(self.integer()), 0

    def integer(self) -> int:
        if self.at >= len(self.tokens) or not self.tokens[self.at].isdigit():
            raise ValueError("a number is missing")
        self.at += 1
        digits = self.tokens[self.at - 1]
        if len(digits) > 20 or int(digits) >= LARGEST:
            raise ValueError("a number that large")
        return int(digits)


def _bounded(degree: int) -> int:
    if degree > MOST_DEGREE:
        raise ValueError(f"a degree above {MOST_DEGREE}")
    return degree
