"""Sizes are parsed by a grammar of our own: nothing in them runs, and none takes long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir import dims
from autopar.ir.dims import parse_size

B, S = (sympy.Symbol(name, integer=True, positive=True) for name in "BS")

WRITTEN = {
    "B": B,
    "16*B": 16 * B,
    "256*B - 1": 256 * B - 1,
    "B*S + 2": B * S + 2,
    "(B - 1)//2 + 1": sympy.floor((B - 1) / 2) + 1,
    "floor(B/2 - 1/2) + 1": sympy.floor(B / 2 - sympy.Rational(1, 2)) + 1,
    "-B + 3": 3 - B,
    "2**10*B**2": 1024 * B**2,
}
CRAFTED = (
    *("__import__('os').system('touch {path}') or B", "B.func", "lambda: B", "exec('1')", "10**10**10", "9" * 40, "B**99"),
    *("(B**8)**8", "(" * 90 + "B" + ")" * 90, "-" * 190 + "B", "1//0", "B//(1 - 1)", "", " ", "B B", "B +", "²", "B\n+1;"),
    *("0x10", "1e9", "B[0]", "floor B"),
)


@pytest.mark.parametrize("text", WRITTEN)
def test_what_is_written_is_what_is_meant(text: str) -> None:
    assert sympy.expand(parse_size(text) - WRITTEN[text]) == 0


@pytest.mark.parametrize("text", CRAFTED, ids=range(len(CRAFTED)))
def test_anything_else_is_refused_at_once(text: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="is no size"):
        dims.size_at(text.replace("{path}", str(tmp_path / "made")), 4)
    assert time.monotonic() - began < 1 and not (tmp_path / "made").exists()


@given(st.text(alphabet="BS0123456789+-*/() floor._'\"[]^", max_size=60))
@settings(max_examples=500, deadline=2000)
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_size(text)
    except ValueError as error:
        assert "\n" not in str(error)


terms = st.recursive(
    st.one_of(st.integers(0, 99).map(sympy.Integer), st.just(B), st.just(S)),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] - pair[1]),
        st.tuples(inner, st.integers(1, 9)).map(lambda pair: sympy.floor(pair[0] / pair[1])),
    ),
    max_leaves=8,
)


@given(terms)
@settings(max_examples=200, deadline=None)
def test_what_sympy_prints_is_read_back(expression: sympy.Expr) -> None:
    text = str(sympy.expand(expression))
    if len(text) <= 200:
        assert sympy.expand(parse_size(text) - expression) == 0


def test_a_sum_divides_where_what_is_added_does() -> None:
    whole = {"B": 4, "3*B": 4, "4*B + 2": 2, "B - 6": 3, "floor(B/2)": 2}
    assert all(dims.divisible(dim, by) for dim, by in whole.items())
    assert not dims.divisible("B + 3", 2) and not dims.divisible("2*B - 1", 4) and not dims.divisible(9, 2)
