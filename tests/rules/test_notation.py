"""Factor notation: what is read, what is refused, and how a line is fitted to shapes."""

from __future__ import annotations

import pytest

from autopar.operations.notation.common_factors import common_factors
from autopar.operations.notation.notation import fit_rule, parse_rule


@pytest.mark.parametrize(
    "text",
    [
        "... k+, n k+, n -> ... n",
        "v+ d, ... -> ... d",
        "... (g r) s! d! -> ... (g r) s! d!",
        "a b -> a 2 b",
        "() -> ()",
        "...+ v+, ...+ -> ()",
    ],
)
def test_lines_round_trip(text: str) -> None:
    assert str(parse_rule(text)) == text
    assert parse_rule(str(parse_rule(text))) == parse_rule(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a b -> a", "'b' is missing from a result; mark it b+"),
        ("a b, c -> a b, a", "missing from a result"),
        ("a b a", "one arrow"),
        ("a+ b -> a b", "marked in one place"),
        ("a+ b -> a+ b", "summed but occurs in a result"),
        ("a a -> a", "twice in one operand"),
        ("a ... -> a ...", "stands first and alone"),
        ("a $ -> a", "cannot read"),
    ],
)
def test_a_wrong_line_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="rule") as error:
        parse_rule(text)
    assert says in str(error.value)


def test_fit_expands_batch_dimensions_from_the_right() -> None:
    found = fit_rule(parse_rule("... m k+, ... k+ n -> ... m n"), [("B", 1, 4, 8), (6, 8, 2)], [("B", 6, 4, 2)])
    assert found.operands == ((("batch0",), (), ("m",), ("k",)), (("batch1",), ("k",), ("n",)))
    assert found.size("batch1") == 6


def test_fit_solves_compounds() -> None:
    found = fit_rule(parse_rule("b (g r), b g -> b (g r)"), [("B", 32), ("B", 8)], [("B", 32)])
    assert (found.size("g"), found.size("r")) == (8, 4)


@pytest.mark.parametrize(
    ("line", "operands", "results"),
    [("a b -> a b", [(3,)], [(3,)]), ("a, a -> a", [(3,), (4,)], [(3,)]), ("(a b) -> (a b)", [(6,)], [(6,)])],
)
def test_fit_refuses(line: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="rule"):
        fit_rule(parse_rule(line), operands, results)


@pytest.mark.parametrize(
    ("left", "right", "sizes"),
    [
        (("B", 8192, 4096), ("B", 8192, 32, 128), ["B", 8192, 32, 128]),
        (("B", 16), ("16*B",), ["B", 16]),
        (("3*B", 4), ("B", 12), ["B", 3, 4]),
        ((12, 2), (3, 8), [3, 4, 2]),
        ((6, 4, 5), (4, 6, 5), [5]),
        ((1, "B", 3), ("B", 1, 3), ["B", 3]),
        ((), (1,), []),
    ],
)
def test_common_factors(left: tuple[int | str, ...], right: tuple[int | str, ...], sizes: list[int | str]) -> None:
    assert common_factors(left, right)[2] == sizes
    assert common_factors(right, left)[2] == sizes
