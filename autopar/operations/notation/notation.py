"""The factor notation of sharding rules: parses a line, and fits it to the shapes of one operation.

    aten.linear   "... k+, n k+, n -> ... n"

A word is one tensor dimension. A letter (or name) is a *factor*: dimensions of one factor are sharded together. Its kind (see
`FactorKind`) is a mark: `k+` is summed, `d!` is never sharded. `...` stands for any leading (batch) dimensions, `(a b)` is one
dimension viewed as two, major first, a number is a dimension that is never sharded, and ``()`` alone is a tensor without
dimensions. A factor that is missing from a result needs a mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from autopar.ir.dims import Dim, Shape, as_dim, as_sympy

BATCH_DIMS = "..."
_WORD = re.compile(r"\(([^()]*)\)|(\.\.\.[+!]?|[A-Za-z_]\w*[+!]?|\d+)")
_FACTOR = re.compile(r"(\.\.\.|[A-Za-z_]\w*|\d+)([+!]?)")


class FactorKind(StrEnum):
    """The kinds of factors, as in Shardy's ``OpShardingRule``; the value is the mark of the notation."""

    PLAIN = ""
    """Shardy's pass-through: in operands and results, sharded without communication."""
    SUMMED = "+"
    """Shardy's reduction: in operands only; the results of a sharded one are Partial."""
    WHOLE = "!"
    """Shardy's need-replication: never sharded."""


Term = tuple[str, ...]
"""The factors of one dimension, major first."""
Spec = tuple[Term, ...]
"""The dimensions of one tensor."""


@dataclass(frozen=True, slots=True)
class RuleLine:
    """A parsed line. `kinds` holds the factors that are not plain."""

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    kinds: tuple[tuple[str, FactorKind], ...]

    def kind(self, factor: str) -> FactorKind:
        return FactorKind.WHOLE if factor.isdigit() else dict(self.kinds).get(factor, FactorKind.PLAIN)

    def __str__(self) -> str:
        def spec(terms: Spec) -> str:
            words = ("(" + " ".join(map(self._word, term)) + ")" if len(term) != 1 else self._word(term[0]) for term in terms)
            return " ".join(words) or "()"

        return f"{', '.join(map(spec, self.operands))} -> {', '.join(map(spec, self.results))}"

    def _word(self, factor: str) -> str:
        return factor if factor.isdigit() else factor + self.kind(factor)


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> RuleLine:
    """The rule of a line. ValueError says what is wrong with the line."""
    if text.count("->") != 1:
        raise ValueError(f"rule {text!r}: write operands -> results, with one arrow")
    left, right = text.split("->")
    marked: dict[str, FactorKind] = {}
    seen: dict[str, str] = {}

    def factor(word: str) -> str:
        match = _FACTOR.fullmatch(word)
        if match is None:
            raise ValueError(f"rule {text!r}: {word!r} is not a factor")
        name, mark = match.groups()
        if seen.setdefault(name, mark) != mark:
            raise ValueError(f"rule {text!r}: factor {name!r} is marked in one place and not in another")
        if mark:
            marked[name] = FactorKind(mark)
        return name

    def spec(words: str) -> Spec:
        words = words.strip()
        if words == "()":
            return ()
        rest = _WORD.sub("", words).strip()
        if rest:
            raise ValueError(f"rule {text!r}: cannot read {rest!r}")
        terms = (inner.split() if inner or not word else [word] for inner, word in _WORD.findall(words))
        return tuple(tuple(map(factor, term)) for term in terms)

    operands = tuple(map(spec, left.split(","))) if left.strip() else ()
    results = tuple(map(spec, right.split(",")))
    _check(text, operands, results, marked)
    return RuleLine(operands, results, tuple(marked.items()))


def _check(text: str, operands: Sequence[Spec], results: Sequence[Spec], marked: Mapping[str, FactorKind]) -> None:
    for operand in operands:
        names = [name for term in operand for name in term if not name.isdigit()]
        if len(names) != len(set(names)):
            raise ValueError(f"rule {text!r}: a factor occurs twice in one operand")
        if any(BATCH_DIMS in term for term in operand[1:]) or any(BATCH_DIMS in term and len(term) > 1 for term in operand):
            raise ValueError(f"rule {text!r}: '...' stands first and alone")
    needed = {name for operand in operands for term in operand for name in term if not name.isdigit()}
    for result in results:
        has = {name for term in result for name in term}
        for name in sorted(needed - has - set(marked)):
            raise ValueError(f"rule {text!r}: factor {name!r} is missing from a result; mark it {name}+ (summed) or {name}!")
        for name in sorted(has & {name for name, kind in marked.items() if kind is FactorKind.SUMMED}):
            raise ValueError(f"rule {text!r}: factor {name!r} is summed but occurs in a result")


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of one operation, with its size."""

    name: str
    size: Dim
    kind: FactorKind = FactorKind.PLAIN


@dataclass(frozen=True, slots=True)
class FittedRule:
    """A rule fitted to the shapes of an operation: the factors of each dimension of each tensor, major first. A dimension without
    factors is never sharded."""

    factors: tuple[Factor, ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]

    def size(self, name: str) -> Dim:
        return next(factor.size for factor in self.factors if factor.name == name)


def _batch_rank(specs: Sequence[Spec], shapes: Sequence[Shape], text: str) -> int:
    rank = 0
    for spec, shape in zip(specs, shapes, strict=True):
        if spec and spec[0] == (BATCH_DIMS,):
            if len(shape) < len(spec) - 1:
                raise ValueError(f"rule {text!r} does not fit a tensor of shape {shape}")
            rank = max(rank, len(shape) - len(spec) + 1)
        elif len(spec) != len(shape):
            raise ValueError(f"rule {text!r} does not fit a tensor of shape {shape}")
    return rank


def batch_factor(index: int) -> str:
    """The name of the factor of the batch dimension `index`."""
    return f"batch{index}"


def fit_rule(
    line: RuleLine, operands: Sequence[Shape], results: Sequence[Shape], known: Mapping[str, Dim] | None = None
) -> FittedRule:
    """The rule fitted to the shapes of one operation; `known` are sizes of factors that the shapes do not tell. ValueError where
    it does not fit."""
    specs, shapes = (*line.operands, *line.results), (*operands, *results)
    text = str(line)
    rank = _batch_rank(specs, shapes, text)
    expanded: list[Spec] = []
    for spec, shape in zip(specs, shapes, strict=True):
        if spec and spec[0] == (BATCH_DIMS,):
            count = len(shape) - len(spec) + 1
            spec = (*((batch_factor(index),) for index in range(rank - count, rank)), *spec[1:])
        expanded.append(spec)
    sizes = _solve_sizes(expanded, shapes, dict(known or {}), text)
    fitted = tuple(_drop_broadcast(spec, shape, sizes, text) for spec, shape in zip(expanded, shapes, strict=True))
    batch_kind = line.kind(BATCH_DIMS)
    named = {name: batch_kind if name.startswith("batch") and name[5:].isdigit() else line.kind(name) for name in sizes}
    for name in _repeated(expanded, shapes, sizes):
        if named[name] is FactorKind.SUMMED:
            named[name] = FactorKind.WHOLE
    factors = tuple(Factor(name, size, named[name]) for name, size in sizes.items())
    return FittedRule(factors, fitted[: len(operands)], fitted[len(operands) :])


def _solve_sizes(specs: Sequence[Spec], shapes: Sequence[Shape], sizes: dict[str, Dim], text: str) -> dict[str, Dim]:
    compounds: list[tuple[Term, Dim]] = []
    for spec, shape in zip(specs, shapes, strict=True):
        for term, size in zip(spec, shape, strict=True):
            if len(term) != 1:
                compounds.append((term, size))
            elif not term[0].isdigit() and sizes.get(term[0], 1) == 1:
                sizes[term[0]] = size
    for _ in range(len(compounds)):
        for term, size in compounds:
            unknown = [name for name in term if not name.isdigit() and name not in sizes]
            if len(unknown) == 1:
                rest = as_sympy(size)
                for name in term:
                    if name != unknown[0]:
                        rest = rest / as_sympy(int(name) if name.isdigit() else sizes[name])
                sizes[unknown[0]] = as_dim(rest)
    missing = {name for term, _ in compounds for name in term if not name.isdigit() and name not in sizes}
    if missing:
        raise ValueError(f"rule {text!r}: the sizes of {', '.join(sorted(missing))} do not follow from the shapes")
    return sizes


def _repeated(specs: Sequence[Spec], shapes: Sequence[Shape], sizes: Mapping[str, Dim]) -> set[str]:
    """The factors along which a tensor is broadcast from one element. Where such a factor is summed, the tensor may be multiplied
    with others (``einsum("bd,bd->b", x, y)`` with one column in `y`): without the factor it would be taken for an addend."""
    words = (
        (term[0], size)
        for spec, shape in zip(specs, shapes, strict=True)
        for term, size in zip(spec, shape, strict=True)
        if len(term) == 1
    )
    return {name for name, size in words if size == 1 and not name.isdigit() and sizes[name] != 1}


def _drop_broadcast(spec: Spec, shape: Shape, sizes: Mapping[str, Dim], text: str) -> Spec:
    out: list[Term] = []
    for term, size in zip(spec, shape, strict=True):
        if len(term) == 1 and not term[0].isdigit():
            if size != sizes[term[0]] and size != 1:
                raise ValueError(f"rule {text!r} does not fit a tensor of shape {shape}: {term[0]} is {sizes[term[0]]} elsewhere")
            term = () if size == 1 else term
        elif len(term) == 1:
            term = ()
        out.append(term)
    return tuple(out)
