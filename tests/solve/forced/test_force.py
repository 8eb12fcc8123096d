"""Force strings are parsed once, and whatever is wrong with one is a line."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.solve.space.force import parse_force


@pytest.mark.parametrize(
    "text", ["pp=" + "9" * 30, "tp=²", "tp=٣", "tp=-1", "zero=4", "tp=", "=4", "tp", "schedule=fast", "micro=1e3"]
)
def test_what_is_no_degree_is_one_line_at_once(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(AutoparError) as caught:
        parse_force(text)
    assert "\n" not in str(caught.value) and time.monotonic() - began < 1


@given(st.text(alphabet="dptzerovscmi_=,0123456789-+ ²٣\n", max_size=40))
@settings(max_examples=1000, deadline=None)
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_force(text)
    except AutoparError as error:
        assert str(error).strip()
