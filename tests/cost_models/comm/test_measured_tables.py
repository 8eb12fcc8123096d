"""Measured tables of collectives: the function between their points, what other axes are priced by, and the envelope that bounds
are made of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.comm.collectives import collective_seconds, explain_collective, fastest_algorithm
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.cost_models.hardware.measured_collectives import MeasuredCollective, PiecewiseLinear, rising

CONVEX = PiecewiseLinear((1e6, 16e6, 64e6), (2e-3, 23e-3, 200e-3))
PLAIN = Link("loopback", 4, 1e9, 1e-3, factors=(("parameter_gather", 1.5, 2.0),))
LAUNCH = 1e-5


def measured(*tables: MeasuredCollective) -> Link:
    return replace(PLAIN, measured=tables)


def axis(link: Link, width: int = 4) -> AxisLink:
    return AxisLink(width, (Level(link, width),), LAUNCH, ("ring",))


@st.composite
def tables(draw: st.DrawFn) -> PiecewiseLinear:
    count = draw(st.integers(2, 6))
    steps = st.lists(st.integers(1, 50), min_size=count, max_size=count)
    rises = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    sizes, seconds, size, time = [], [], draw(st.sampled_from([-1, 0])), 1
    for step, rise in zip(draw(steps), draw(rises), strict=True):
        size, time = max(0, size + step), time + rise
        sizes.append(float(size))
        seconds.append(float(time))
    return PiecewiseLinear(tuple(sizes), tuple(seconds))


def test_linear_between_and_beyond() -> None:
    assert [CONVEX.at(size) for size in (1e6, 16e6, 64e6)] == pytest.approx([2e-3, 23e-3, 200e-3])
    assert CONVEX.at(8.5e6) == pytest.approx(12.5e-3) and CONVEX.at(40e6) == pytest.approx(111.5e-3)
    assert CONVEX.at(112e6) == pytest.approx(377e-3), "the slope of the last segment"
    assert CONVEX.at(0) == CONVEX.at(5e5) == 2e-3
    assert PiecewiseLinear.of(reversed(CONVEX.points)) == CONVEX


@given(tables(), st.integers(0, 900), st.integers(0, 900))
def test_larger_messages_take_no_less(table: PiecewiseLinear, one: int, other: int) -> None:
    assert table.at(min(one, other)) <= table.at(max(one, other))


@given(tables(), st.floats(0.01, 900), st.floats(1, 20))
def test_the_envelope_has_no_diseconomies(table: PiecewiseLinear, size: float, times: float) -> None:
    """It is below the table, and no k parts cost less than the whole; nor is there a larger such function."""
    least = table.without_diseconomies()
    assert 0 < least.at(size) <= table.at(size) * (1 + 1e-9)
    assert least.at(times * size) <= times * least.at(size) * (1 + 1e-9)
    inside = [each for each in table.sizes if 0 < each <= size]
    assert least.at(size) == pytest.approx(size * min(table.at(each) / each for each in (*inside, size)), rel=1e-6)


def test_the_envelope_of_fresh_pages() -> None:
    """A 64 MB message costs no more than four of 16 MB; what is concave stays as it is."""
    least = CONVEX.without_diseconomies()
    assert least.at(64e6) == pytest.approx(4 * 23e-3) and least.at(640e6) == pytest.approx(40 * 23e-3)
    concave = PiecewiseLinear((0.0, 10.0, 30.0), (1.0, 3.0, 5.0))
    assert concave.without_diseconomies() == concave


@given(st.lists(st.integers(1, 100), min_size=2, max_size=8))
def test_falling_seconds_are_averaged(seconds: list[int]) -> None:
    """Against the formula of isotonic regression: the largest mean from before over the smallest mean to after."""
    count = len(seconds)
    found = rising((float(size), float(each)) for size, each in enumerate(seconds))

    def mean(first: int, last: int) -> float:
        return sum(seconds[first : last + 1]) / (last + 1 - first)

    expected = [max(min(mean(i, j) for j in range(k, count)) for i in range(k + 1)) for k in range(count)]
    assert found.seconds == pytest.approx(expected) and all(a <= b for a, b in pairwise(found.seconds))


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "point_to_point", "parameter_gather"])
def test_the_measured_axis_costs_what_was_measured(kind: str) -> None:
    link = measured(MeasuredCollective(kind, 4, CONVEX))
    for size in (1e6, 3e6, 16e6, 50e6, 64e6, 90e6):
        assert collective_seconds(kind, size, axis(link)) == pytest.approx(CONVEX.at(size), rel=1e-12)
        found = fastest_algorithm(kind, size, axis(link))
        assert found.seconds == pytest.approx(CONVEX.at(size)) and found.protocol == "measured"
        assert f"= {found.seconds:.6g} seconds" in explain_collective(kind, size, axis(link))
    assert collective_seconds("broadcast", 5e6, axis(link)) == collective_seconds("broadcast", 5e6, axis(PLAIN))
    assert collective_seconds(kind, 64e6, AxisLink(1, (), LAUNCH)) == 0


def test_other_widths_take_as_many_times_their_formula() -> None:
    link = measured(MeasuredCollective("all_gather", 4, CONVEX))
    ring = {width: width_ring(width) for width in (2, 4)}
    for size in (1e6, 16e6, 64e6):
        slowdown = (CONVEX.at(size) - LAUNCH) / ring[4](size)
        assert collective_seconds("all_gather", size, axis(link, 2)) == pytest.approx(LAUNCH + slowdown * ring[2](size))
    pairs = MeasuredCollective("all_gather", 2, PiecewiseLinear((1.0, 1e9), (1.0, 2.0)))
    both = measured(MeasuredCollective("all_gather", 4, CONVEX), pairs)
    assert collective_seconds("all_gather", 1e9, axis(both, 2)) == pytest.approx(2.0)


def width_ring(width: int):  # type: ignore[no-untyped-def]
    return lambda size: (width - 1) * 1e-3 + (1 - 1 / width) * size / 1e9


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all"])
def test_several_levels(kind: str) -> None:
    """Tables that say what the formula says change nothing; a slow inner level leaves the network as fast as it is."""
    inner, outer = Link("loopback", 2, 1e9, 2e-4), Link("network", 4, 1.4e7, 5e-4)

    def joined(first: Link, second: Link) -> AxisLink:
        return AxisLink(4, (Level(first, 2), Level(second, 2)), LAUNCH, ("ring",))

    def table(link: Link, times: float) -> Link:
        points = [(size, times * collective_seconds(kind, size, axis(link, 2))) for size in (2.0**12, 2.0**18, 2.0**22)]
        return replace(link, measured=(MeasuredCollective(kind, 2, PiecewiseLinear.of(points)),))

    for size in (100.0, 2.0**12, 2.0**15, 2.0**22, 2.0**26):
        plain = collective_seconds(kind, size, joined(inner, outer))
        assert collective_seconds(kind, size, joined(table(inner, 1.0), table(outer, 1.0))) == pytest.approx(plain)
    slow = collective_seconds(kind, 2.0**22, joined(table(inner, 2.0), outer))
    assert slow == pytest.approx(collective_seconds(kind, 2.0**22, joined(inner, outer)), rel=0.01)
    assert collective_seconds(kind, 2.0**22, joined(inner, table(outer, 2.0))) > 1.9 * slow


def test_state_without_a_table_of_its_own() -> None:
    """It is priced by that of the plain collective; messages by the outermost level's."""
    link = measured(MeasuredCollective("all_gather", 4, CONVEX))
    assert collective_seconds("parameter_gather", 64e6, axis(link)) == pytest.approx(200e-3)
    assert collective_seconds("gradient_scatter", 64e6, axis(link)) == collective_seconds("gradient_scatter", 64e6, axis(PLAIN))
    sent = measured(MeasuredCollective("point_to_point", 2, CONVEX))
    deep = AxisLink(4, (Level(PLAIN, 2), Level(replace(sent, name="network"), 2)), LAUNCH, ("ring",))
    assert collective_seconds("point_to_point", 64e6, deep) == pytest.approx(200e-3)


def test_noise_below_a_launch() -> None:
    """A measured time may be shorter than the launch; on other widths the price still rises with the size."""
    link = measured(MeasuredCollective("all_gather", 2, PiecewiseLinear((1e3, 1e6, 1e8), (1e-6, 2e-6, 1e-1))))
    prices = [collective_seconds("all_gather", size, axis(link)) for size in (0.0, 1e3, 1e5, 1e6, 1e7, 1e8, 1e9)]
    assert prices == sorted(prices) and prices[0] > 0
