"""A formula of the cost models as sympy reads it: the expression, for derivatives, and sympy's own function of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import sympy

from autopar.cost_models.formulas.formula import Formula


@cache
def expression_of(formula: Formula) -> Any:
    """The expression; its symbols are positive. (From our own text: sympy's parser takes 3 ms.)"""
    known: dict[str, Any] = {name: getattr(sympy, name) for name in ("ceiling", "log", "sqrt")}
    known |= {name: partial(getattr(sympy, name), evaluate=False) for name in ("Max", "Min")}  # else compared for 20 ms
    return sympy.sympify(eval(formula.text, {"__builtins__": {}}, {**known, **_symbols(formula)}))


@cache
def sympy_function(formula: Formula) -> Callable[..., float]:
    """The function that sympy makes of it."""
    made: Callable[..., float] = sympy.lambdify(list(_symbols(formula).values()), expression_of(formula), "math")
    return made


def _symbols(formula: Formula) -> dict[str, Any]:
    return {name: sympy.Symbol(name, positive=True) for name in formula.names}
