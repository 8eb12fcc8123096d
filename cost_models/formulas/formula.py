"""`Formula`: one line of text with named parameters, as a Python function, which compiles in about 50 us.

The text is sympy's too: tests hold the function against sympy's, which takes half a second to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, log, sqrt

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
    def function(self) -> Callable[..., float]:
        """The text as a function of positional numbers in the order of `parameters`."""
        return _function(self.text, self.names)

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
def _function(text: str, names: tuple[str, ...]) -> Callable[..., float]:
    known = {"__builtins__": {}, "ceiling": ceil, "log": log, "sqrt": sqrt, "Max": max, "Min": min}
    made: Callable[..., float] = eval(f"lambda {', '.join(names)}: {text}", known)  # our own text
    return made
