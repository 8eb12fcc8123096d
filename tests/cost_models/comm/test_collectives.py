"""Collectives against sums done by hand, and what must hold of any."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.comm.alpha_beta import algorithm_cost, algorithm_costs
from autopar.cost_models.comm.collectives import (
    collective_seconds,
    explain_collective,
    fastest_algorithm,
    parameter_server_seconds,
)
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.cost_models.hardware.measured_collectives import KINDS

FLAT = AxisLink(4, (Level(Link("nv", 4, 100.0, 0.5), 4),), 2.0)
DEEP = AxisLink(8, (Level(Link("nv", 4, 100.0, 0.5), 4), Level(Link("ib", 2, 10.0, 3.0), 2)), 2.0)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 2 + 3 * 0.5 + 3 / 4 * 1000 / 100),
        ("reduce_scatter", 2 + 3 * 0.5 + 3 / 4 * 1000 / 100),
        ("all_reduce", 2 + 2 * (3 * 0.5 + 3 / 4 * 1000 / 100)),
        ("all_to_all", 2 + 3 * 0.5 + 3 * 1000 / 16 / 100),
        ("broadcast", 2 + 3 * 0.5 + 1000 / 100),
        ("point_to_point", 2 + 0.5 + 1000 / 100),
    ],
)
def test_flat(kind: str, seconds: float) -> None:
    assert collective_seconds(kind, 1000, FLAT) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "algorithm", "seconds"),
    [
        # 7 steps, 1 of them across; 7/8 of the tensor leaves each node over its four cards
        ("all_gather", "ring", 2 + 6 * 0.5 + 3 + 7 / 8 * 1000 / 40),
        ("all_reduce", "ring", 2 + 2 * (6 * 0.5 + 3 + 7 / 8 * 1000 / 40)),
        # down a chain of four and over to the other node, and back; one tensor each way over four cards
        ("all_reduce", "tree", 2 + 2 * (3 * 0.5 + 3) + 1000 / 40),
        # in the node 3/4 x 1000 bytes at 100; across, each of four members a quarter of the tensor: 1/2 x 250 at 10
        ("all_gather", "hierarchical", 2 + 3 * 0.5 + 3 + max(7.5, 12.5)),
        ("all_reduce", "hierarchical", 2 + 2 * (3 * 0.5 + 3 + 12.5)),
        # 1000 / 64 bytes to each of three in the node, and to each of four in the other one
        ("all_to_all", "direct", 2 + 3 * 0.5 + 4 * 3 + max(3 * 1000 / 64 / 100, 4 * 1000 / 64 / 10)),
        ("point_to_point", "direct", 2 + 3 + 1000 / 10),
    ],
)
def test_two_levels(kind: str, algorithm: str, seconds: float) -> None:
    assert algorithm_cost(kind, algorithm, "", DEEP).seconds(1000) == pytest.approx(seconds)


def test_the_cheapest_is_taken_and_named() -> None:
    assert (
        str(fastest_algorithm("all_reduce", 1000, DEEP)) == "tree"
        and fastest_algorithm("all_gather", 1000, DEEP).algorithm == "ring"
    )
    nested = replace(DEEP, algorithms=("hierarchical",))
    assert fastest_algorithm("all_gather", 1000, nested).algorithm == "hierarchical"
    both = replace(DEEP, algorithms=("ring", "hierarchical"))
    for kind in ("all_gather", "all_reduce"):
        assert collective_seconds(kind, 1000, both) == min(collective_seconds(kind, 1000, link) for link in (nested, both))


def test_small_all_reduce_is_a_tree() -> None:
    link = AxisLink(64, (Level(Link("ib", 64, 100.0, 1.0), 64),))
    assert collective_seconds("all_reduce", 0, link) == 2 * 6
    assert collective_seconds("all_gather", 0, link) == 63


def test_small_messages_have_their_own_protocol() -> None:
    level = Level(Link("nv", 4, 100.0, 5.0, low_latency_seconds=1.0, low_latency_bandwidth_bytes_per_second=25.0), 4)
    link = AxisLink(4, (level,))
    assert fastest_algorithm("all_gather", 1, link).protocol == "low latency"
    assert collective_seconds("all_gather", 1, link) == pytest.approx(3 * 1.0 + 3 / 4 / 25)
    assert fastest_algorithm("all_gather", 1e6, link).protocol == ""
    meet = 3 * (5.0 - 1.0) / (3 / 4 * (1 / 25 - 1 / 100))  # where both take equally long
    assert {fastest_algorithm("all_gather", meet * f, link).protocol for f in (0.99, 1.01)} == {"low latency", ""}


def test_sums_in_the_switch() -> None:
    """A member sends the tensor and its own part of the sum: bus bandwidth 2 (n-1) / (n+1) times the link's."""
    level = Level(Link("nv", 8, 100.0, 0.0, switch_seconds=2.0, switch_bandwidth_bytes_per_second=90.0), 8)
    link = AxisLink(8, (level,), 1.0)
    assert fastest_algorithm("all_reduce", 1e6, link).algorithm == "switch"
    assert collective_seconds("all_reduce", 900, link) == pytest.approx(1 + 4 + 9 / 8 * 10)
    assert collective_seconds("all_gather", 800, link) == pytest.approx(1 + 7)


def test_one_rank_is_free_and_names_are_checked() -> None:
    assert all(collective_seconds(kind, 1e9, AxisLink(1, (), 5.0)) == 0 for kind in KINDS)
    assert parameter_server_seconds(1e9, AxisLink(1, (), 5.0)) == 0
    with pytest.raises(ValueError, match="gossip"):
        collective_seconds("gossip", 1, FLAT)


def test_parameter_server() -> None:
    """Four workers push and pull 1000 bytes each at one server's 100 bytes/s."""
    assert parameter_server_seconds(1000, FLAT) == pytest.approx(2 + 2 * (0.5 + 40))
    assert parameter_server_seconds(1000, FLAT, servers=4) == pytest.approx(2 + 2 * (0.5 + 10))
    assert parameter_server_seconds(1e6, FLAT) > collective_seconds("all_reduce", 1e6, FLAT)


def test_explained() -> None:
    text = explain_collective("all_reduce", 1000, DEEP)
    assert "all_reduce.tree.2 = launch + 2*(d1*a1 + d2*a2)" in text and "NCCL" in text
    assert f"= {collective_seconds('all_reduce', 1000, DEEP):.6g} seconds" in text


links = st.builds(
    lambda widths, rate, fast: AxisLink(
        widths[0] * widths[1],
        (
            Level(Link("nv", widths[0], 10 * rate, 1e-6, "switch", 5e-7, fast * rate, 1e-5, fast * 8 * rate), widths[0]),
            Level(Link("ib", widths[1], rate, 1e-5, "switch", 2e-6, fast * rate / 4), widths[1]),
        ),
        1e-6,
    ),
    st.tuples(st.integers(2, 8), st.integers(2, 64)),
    st.floats(1e9, 1e11),
    st.sampled_from((0.0, 1.0)),
)


@settings(deadline=None)
@given(st.sampled_from(KINDS), links, st.floats(0, 1e10), st.floats(0, 1e10))
def test_more_bytes_take_longer(kind: str, link: AxisLink, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert collective_seconds(kind, small, link) <= collective_seconds(kind, large, link)


@settings(deadline=None)
@given(links, st.floats(0, 1e10))
def test_all_reduce_is_between_one_pass_and_two(link: AxisLink, size: float) -> None:
    gather = collective_seconds("all_gather", size, link)
    both = gather + collective_seconds("reduce_scatter", size, link)
    assert collective_seconds("all_reduce", size, link) <= both * (1 + 1e-12)


@settings(deadline=None, max_examples=50)  # sympy is slow at first
@given(st.sampled_from(KINDS), links, st.floats(0, 1e10))
def test_the_lines_are_the_formulas(kind: str, link: AxisLink, size: float) -> None:
    """Each line is what sympy finds for its formula with these numbers, at any size; the cheapest line is the price."""
    from support.judges.sympy_formulas import expression_of

    from autopar.cost_models.comm.collectives import formula_values
    from autopar.cost_models.formulas.registry import formula

    prices = []
    for line in algorithm_costs(kind, link):
        found = formula(f"{kind}.{line.algorithm}.{1 if kind == 'point_to_point' else 2}")
        values = {**formula_values(kind, line.algorithm, line.protocol, link), "N": size}
        expression = expression_of(found)
        exact = expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols})
        assert line.seconds(size) == pytest.approx(float(exact), rel=1e-9)
        prices.append(line.seconds(size))
    assert collective_seconds(kind, size, link) == min(prices) == fastest_algorithm(kind, size, link).seconds


@settings(deadline=None)
@given(st.sampled_from(("all_gather", "all_reduce", "all_to_all")), links, st.floats(0, 1e10), st.floats(1.1, 10))
def test_a_faster_link_is_never_slower(kind: str, link: AxisLink, size: float, times: float) -> None:
    inner = link.levels[0]
    first = replace(inner, link=replace(inner.link, bandwidth_bytes_per_second=times * inner.link.bandwidth_bytes_per_second))
    assert collective_seconds(kind, size, replace(link, levels=(first, link.levels[1]))) <= collective_seconds(kind, size, link)


def test_torus_all_to_all_by_counting_hops() -> None:
    """A whole ring of 8, each cable 50 bytes/s each way: messages take the shorter way; count the busiest cable."""
    load = [[0.0] * 8 for _ in range(2)]
    for source in range(8):
        for target in range(8):
            ahead = (target - source) % 8
            ways = [(0, ahead, 1.0)] if ahead < 4 else [(1, 8 - ahead, 1.0)] if ahead > 4 else [(0, 4, 0.5), (1, 4, 0.5)]
            for way, hops, part in ways:
                for hop in range(hops):
                    load[way][(source + hop) % 8 if way == 0 else (source - hop - 1) % 8] += part * 6400 / 64
    ring = AxisLink(8, (Level(Link("ici", 8, 100.0, 0.0, "ring"), 8),))
    assert collective_seconds("all_to_all", 6400, ring) == pytest.approx(max(map(max, load)) / 50)


def wider(link: AxisLink, more: int) -> AxisLink:
    """The same nodes, and `more` of them."""
    last = replace(link.levels[-1], width=link.levels[-1].width + more)
    return AxisLink(
        link.size // link.levels[-1].width * last.width, (*link.levels[:-1], last), link.launch_seconds, link.algorithms
    )


@settings(deadline=None)
@given(st.sampled_from(KINDS), links, st.integers(1, 64), st.floats(0, 1e10))
def test_more_nodes_are_not_faster(kind: str, link: AxisLink, more: int, size: float) -> None:
    """The whole tensor stays; for all_to_all what each member has."""
    large = wider(link, more)
    times = large.size / link.size if kind == "all_to_all" else 1.0
    assert collective_seconds(kind, size, link) <= collective_seconds(kind, size * times, large) * (1 + 1e-9)


@settings(deadline=None)
@given(links, st.floats(1e3, 1e10))
def test_no_link_carries_more_than_it_can(link: AxisLink, size: float) -> None:
    """Whatever the algorithm: each node must take in what it lacks, through all of its cards; reduced tensors go out and come in
    at once. Each member takes in what it lacks through all that it has."""
    inner, outer = link.levels
    card, nvlink = outer.link.bandwidth_bytes_per_second, inner.link
    lacked = (1 - 1 / outer.width) * size / (inner.width * card)
    fastest = max(nvlink.bandwidth_bytes_per_second, nvlink.switch_bandwidth_bytes_per_second) + card
    own = (1 - 1 / link.size) * size / fastest
    for kind in ("all_gather", "reduce_scatter", "broadcast", "all_reduce"):
        passes = 2 if kind == "all_reduce" else 1
        assert collective_seconds(kind, size, link) >= max(passes * lacked, own) * (1 - 1e-9)
    across = size / link.size * (1 - 1 / outer.width) / card
    assert collective_seconds("all_to_all", size, link) >= across * (1 - 1e-9)


@settings(deadline=None)
@given(st.sampled_from(("all_gather", "reduce_scatter", "all_reduce", "broadcast")), links, st.floats(0, 1e10))
def test_level_by_level_is_at_most_the_flat_ring(kind: str, link: AxisLink, size: float) -> None:
    for protocol in ("", "low latency"):
        nested, flat = (algorithm_cost(kind, algorithm, protocol, link).seconds(size) for algorithm in ("hierarchical", "ring"))
        assert nested <= flat * (1 + 1e-9)
    free = replace(link, algorithms=("ring", "hierarchical"))
    assert collective_seconds(kind, size, free) <= collective_seconds(kind, size, replace(link, algorithms=("ring",))) * (
        1 + 1e-9
    )


@settings(deadline=None)
@given(links, st.floats(1, 1e10), st.integers(1, 16))
def test_a_parameter_server_is_the_ring_with_as_many_servers_as_workers(link: AxisLink, size: float, servers: int) -> None:
    """Then each link carries the tensor in and out once; fewer servers are slower by as much."""
    level = Level(replace(link.levels[1].link, latency_seconds=0.0), link.size)
    flat = AxisLink(link.size, (level,), 0.0, ("ring",))
    ring = algorithm_cost("all_reduce", "ring", "", flat).seconds(size)
    everyone = parameter_server_seconds(size, flat, link.size)
    assert everyone == pytest.approx(ring * link.size / (link.size - 1))
    assert parameter_server_seconds(size, flat, servers) == pytest.approx(everyone * link.size / servers)


@settings(deadline=None)
@given(st.lists(st.integers(2, 8), min_size=1, max_size=3), st.sampled_from(("all_gather", "all_reduce")), st.floats(0, 1e10))
def test_torus_dimensions(widths: list[int], kind: str, size: float) -> None:
    """One ring after the other; a dimension more is not faster, and the first one moves most."""
    levels = tuple(Level(Link(f"ici{i}", width, 1e9, 1e-6, "ring"), width) for i, width in enumerate(widths))
    count = 1
    before = 0.0
    for index, width in enumerate(widths):
        count *= width
        seconds = collective_seconds(kind, size, AxisLink(count, levels[: index + 1], 0.0, ("hierarchical",)))
        assert seconds >= before
        before = seconds
    moved = max((1 - 1 / width) * size / 1e9 / prod(widths[:index]) for index, width in enumerate(widths))
    steps = sum(width - 1 for width in widths) * 1e-6
    assert before == pytest.approx((2 if kind == "all_reduce" else 1) * (steps + moved))
