"""Collectives against sums done by hand, and what must hold of any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import KINDS, collective_seconds
from autopar.cost_models.hardware import AxisLink, Level

FLAT = AxisLink(4, (Level("nv", 4, 100.0, 0.5),), 2.0)
DEEP = AxisLink(8, (Level("nv", 4, 100.0, 0.5), Level("ib", 2, 10.0, 3.0)), 2.0)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 2 + 3 * 0.5 + 3 / 4 * 1000 / 100),
        ("reduce_scatter", 2 + 3 * 0.5 + 3 / 4 * 1000 / 100),
        ("all_reduce", 2 + 2 * (3 * 0.5 + 3 / 4 * 1000 / 100)),
        ("all_to_all", 2 + 3 * 0.5 + 3 * 1000 / 16 / 100),
        ("broadcast", 2 + 3 * 0.5 + 1000 / 100),
    ],
)
def test_flat(kind: str, seconds: float) -> None:
    assert collective_seconds(kind, 1000, FLAT) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # in the node 3/4 x 1000 bytes at 100; across, each of four members a quarter of the tensor: 1/2 x 250 at 10
        ("all_gather", 2 + 3 * 0.5 + 3 + max(7.5, 12.5)),
        ("all_reduce", 2 + 2 * (3 * 0.5 + 3 + 12.5)),
        # 1000 / 64 bytes to each of three in the node, and to each of four in the other one
        ("all_to_all", 2 + 3 * 0.5 + 3 + max(3 * 1000 / 64 / 100, 4 * 1000 / 64 / 10)),
    ],
)
def test_hierarchical(kind: str, seconds: float) -> None:
    assert collective_seconds(kind, 1000, DEEP) == pytest.approx(seconds)


def test_small_all_reduce_is_a_tree() -> None:
    link = AxisLink(64, (Level("ib", 64, 100.0, 1.0),))
    assert collective_seconds("all_reduce", 0, link) == 2 * 6
    assert collective_seconds("all_gather", 0, link) == 63


def test_one_rank_is_free_and_names_are_checked() -> None:
    assert collective_seconds("all_reduce", 1e9, AxisLink(1, (), 5.0)) == 0
    with pytest.raises(ValueError, match="gossip"):
        collective_seconds("gossip", 1, FLAT)


links = st.builds(
    lambda widths, rate: AxisLink(
        widths[0] * widths[1], (Level("nv", widths[0], 10 * rate, 1e-6), Level("ib", widths[1], rate, 1e-5)), 1e-6
    ),
    st.tuples(st.integers(2, 8), st.integers(2, 64)),
    st.floats(1e9, 1e11),
)


@given(st.sampled_from(KINDS), links, st.floats(0, 1e10), st.floats(0, 1e10))
def test_more_bytes_take_longer(kind: str, link: AxisLink, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert collective_seconds(kind, small, link) <= collective_seconds(kind, large, link)


@given(links, st.floats(0, 1e10))
def test_all_reduce_is_between_one_pass_and_two(link: AxisLink, size: float) -> None:
    gather = collective_seconds("all_gather", size, link)
    both = gather + collective_seconds("reduce_scatter", size, link)
    assert collective_seconds("all_reduce", size, link) <= both * (1 + 1e-12)
    assert collective_seconds("all_to_all", size, link) <= gather * (1 + 1e-12)
