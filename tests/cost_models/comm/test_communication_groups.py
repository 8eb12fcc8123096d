"""Who shares one copy of the state, by hand on two nodes; and tokens that go to experts, by enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from support.plans.mesh import mesh_of

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.comm.shard_groups import (
    distinct_share,
    expert_links,
    operation_collective_seconds,
    sent_once_seconds,
    state_links,
)
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Invariant, Placements, Replicate, Shard
from autopar.operations.notation.rule import OperationCollective

TWO = Cluster.parse("dgx-h100:2")
INNER, OUTER = TWO.links[0].name, TWO.links[-1].name


def levels(link: AxisLink) -> list[tuple[str, int]]:
    return [(level.link.name, level.width) for level in link.levels if level.width > 1]


@pytest.mark.parametrize(
    ("axes", "group", "inside", "across"),
    [
        ({"dp": 16}, 0, [(INNER, 8), (OUTER, 2)], None),
        ({"dp": 16}, 16, [(INNER, 8), (OUTER, 2)], None),
        ({"dp": 16}, 8, [(INNER, 8)], [(OUTER, 2)]),
        ({"dp": 16}, 4, [(INNER, 4)], [(INNER, 2), (OUTER, 2)]),
        ({"dp": 8, "tp": 2}, 4, [(INNER, 4)], [(OUTER, 2)]),
        ({"dp": 2, "tp": 8}, 1, [], [(OUTER, 2)]),
    ],
)
def test_groups_of_neighbours(axes: dict[str, int], group: int, inside: list[object], across: list[object] | None) -> None:
    """HSDP: one copy inside a group; equal places of the groups all-reduce."""
    mesh = mesh_of(**axes)
    here, there = state_links(TWO, mesh, group)
    assert levels(here) == inside
    assert (there is None) == (across is None) and (there is None or levels(there) == across)
    assert here.size * (there.size if there else 1) == mesh.size_of("dp")


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="groups of 3"):
        state_links(TWO, mesh_of(dp=16), 3)
    with pytest.raises(PlanError, match="groups of 5"):
        expert_links(TWO, mesh_of(dp=16), 5, [(Replicate(),)])


def test_ranks_with_the_same_experts() -> None:
    """Eight neighbours hold all experts: the ranks that hold the same ones are on different nodes, one of each. With experts
    that the model axis does not cut, its ranks are among the eight; with experts that it cuts, the data axis alone is."""
    assert levels(expert_links(TWO, mesh_of(dp=16), 8, [(Replicate(),)])) == [(OUTER, 2)]
    whole: Placements = (Replicate(), Invariant())
    cut: Placements = (Replicate(), Shard(1))
    mesh = mesh_of(dp=8, tp=2)
    assert levels(expert_links(TWO, mesh, 8, [whole])) == [(OUTER, 2)]
    assert levels(expert_links(TWO, mesh, 4, [cut])) == [(OUTER, 2)]
    assert expert_links(TWO, mesh, 8, [whole]).size == expert_links(TWO, mesh, 4, [cut]).size == 2


@pytest.mark.parametrize(("copies", "places"), list(product((1, 2, 3, 5), (1, 2, 3, 4))))
def test_copies_that_go_to_the_same_place_travel_once(copies: int, places: int) -> None:
    drawn = list(product(range(places), repeat=copies))
    mean = sum(len(set(each)) for each in drawn) / len(drawn)
    assert distinct_share(copies, places) == pytest.approx(mean / copies)


def seconds(mesh: Mesh, collective: OperationCollective, axis: int, label: tuple[str, ...], cuts: tuple[int, ...]) -> float:
    return operation_collective_seconds(collective, 1e9, axis, label, cuts, mesh, TWO)


def test_a_collective_of_an_operation_moves_what_the_other_axes_leave() -> None:
    """A vocabulary-parallel loss on tp: the rows are cut over dp already."""
    mesh, reduce = mesh_of(dp=4, tp=4), OperationCollective("all_reduce", ("B", 8), "float32")
    link = links_of_axis(TWO, mesh, 1)
    assert seconds(mesh, reduce, 1, ("batch", "vocabulary"), (4, 4)) == collective_seconds("all_reduce", 1e9 / 4, link)
    assert seconds(mesh, reduce, 1, ("redundant", "vocabulary"), (1, 4)) == collective_seconds("all_reduce", 1e9, link)


def test_tokens_move_among_neighbours_of_all_axes_that_cut_them() -> None:
    """16 ranks in groups of 8, which are a node each: an all-to-all of what the group has, and on one node every copy travels."""
    mesh = mesh_of(dp=8, tp=2)
    moved = OperationCollective("all_to_all", ("B", 8), "bfloat16", group=8, tokens=True)
    found = seconds(mesh, moved, 0, ("batch", "batch.1"), (8, 2))
    one_node = links_of_axis(TWO, mesh_of(dp=2, ep=8), 1)
    assert found == pytest.approx(collective_seconds("all_to_all", 1e9 * 8 / 16, one_node))
    whole = OperationCollective("all_to_all", ("B", 8), "bfloat16", group=16, tokens=True, copies=8)
    wide = links_of_axis(TWO, mesh_of(dp=16), 0)
    share = distinct_share(8, wide.levels[-1].width)
    assert share < 0.3 and prod(level.width for level in wide.levels) == 16
    once = seconds(mesh, whole, 0, ("batch", "batch.1"), (8, 2))
    assert once == sent_once_seconds(1e9, 8, wide)


def test_tokens_that_are_sent_once_take_a_step_for_each_node() -> None:
    """Two nodes of eight: what crosses is the share that is the first to its node, and few bytes take one step, not eight."""
    wide = links_of_axis(TWO, mesh_of(dp=16), 0)
    across = replace(wide, size=2, levels=wide.levels[1:])
    share = distinct_share(8, 2)
    assert sent_once_seconds(1e10, 8, wide) == pytest.approx(collective_seconds("all_to_all", share * 1e10 / 8, across))
    assert sent_once_seconds(16.0, 8, wide) < collective_seconds("all_to_all", 16.0 * share, wide) / 2
    assert sent_once_seconds(1e10, 8, wide) < collective_seconds("all_to_all", 1e10, wide)
