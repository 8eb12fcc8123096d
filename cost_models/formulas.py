"""The formulas of the cost models by name: sympy expressions of named parameters, and the plain functions made of them.

A file with formulas has a function ``formulas()`` that returns them, and stands in `_FILES`. A formula is one line of text, read
twice: by Python as a plain function, which prices plans and is made in some 50 us; and by sympy as an expression, which is made
only to be shown, derived or checked (importing sympy takes half a second, lambdifying one expression 3 ms). A test holds the
plain function against sympy's lambdified one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from math import ceil, log, sqrt
from typing import Any

_FILES = ("collective_formulas", "compute_formulas", "state_formulas", "schedule_formulas")
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


@lru_cache(maxsize=1)
def all_formulas() -> Mapping[str, Formula]:
    """Every formula by name."""
    found: dict[str, Formula] = {}
    for file in _FILES:
        for each in import_module(f"autopar.cost_models.{file}").formulas():
            if each.name in found:
                raise ValueError(f"two formulas are named {each.name}")
            found[each.name] = each
    return found


def formula(name: str) -> Formula:
    """The formula of that name; KeyError lists near names."""
    try:
        return all_formulas()[name]
    except KeyError:
        near = [known for known in all_formulas() if known.startswith(name.partition(".")[0])]
        raise KeyError(f"no formula {name!r}; there are {', '.join(near or all_formulas())}") from None
