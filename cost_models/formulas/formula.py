"""`Formula`: one line of text with named parameters, as a Python function and as a sympy expression.

The Python function prices plans and compiles in about 50 us. The sympy expression is only made for printing, derivatives and
tests (importing sympy takes half a second, lambdifying one expression 3 ms); a test checks the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, log, sqrt
from typing import Any

_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Formula:
    """`text` in Python's (and sympy's) spelling; `parameters` are (name, meaning with its unit), in the order in which `function`
    takes them; `source` is the paper and equation."""

    name: str
    text: str
    parameters: tuple[tuple[str, str], ...]
    source: str
    unit: str = "seconds"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(name for name, _ in self.parameters)

    @property
    def expression(self) -> Any:
        """The sympy expression; its symbols are positive."""
        return _expression(self.text, self.names)

    @property
    def function(self) -> Callable[..., float]:
        """The text as a function of positional numbers in the order of `parameters`, without sympy."""
        return _function(self.text, self.names)

    @property
    def lambdified(self) -> Callable[..., float]:
        """The same function, made by sympy from the expression."""
        return _lambdified(self.text, self.names)

    def value(self, values: Mapping[str, float]) -> float:
        """The number for named values; KeyError on a missing one."""
        return float(self.function(*(values[name] for name in self.names)))

    def explain(self, values: Mapping[str, float] | None = None) -> str:
        """The formula without numbers, what its parameters mean, and (given `values`) the same with numbers and the result."""
        lines = [f"{self.name} = {self.text}   [{self.unit}; {self.source}]"]
        lines += [f"  {name}: {meaning}" for name, meaning in self.parameters]
        if values is not None:
            inserted = _WORD.sub(lambda word: f"{values[word[0]]:.6g}" if word[0] in values else word[0], self.text)
            lines.append(f"  = {inserted} = {self.value(values):.6g} {self.unit}")
        return "\n".join(lines)


@cache
def _expression(text: str, names: tuple[str, ...]) -> Any:
    import sympy

    known: dict[str, Any] = {name: getattr(sympy, name) for name in ("ceiling", "log", "sqrt")}
    known |= {name: partial(getattr(sympy, name), evaluate=False) for name in ("Max", "Min")}  # else compared for 20 ms
    symbols = {name: sympy.Symbol(name, positive=True) for name in names}
    return sympy.sympify(eval(text, {"__builtins__": {}}, {**known, **symbols}))  # our own text; sympy's parser takes 3 ms


@cache
def _function(text: str, names: tuple[str, ...]) -> Callable[..., float]:
    known = {"__builtins__": {}, "ceiling": ceil, "log": log, "sqrt": sqrt, "Max": max, "Min": min}
    made: Callable[..., float] = eval(f"lambda {', '.join(names)}: {text}", known)  # our own text
    return made


@cache
def _lambdified(text: str, names: tuple[str, ...]) -> Callable[..., float]:
    from sympy import Symbol, lambdify

    made: Callable[..., float] = lambdify([Symbol(name, positive=True) for name in names], _expression(text, names), "math")
    return made
