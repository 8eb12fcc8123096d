"""One conversion of every kind against the table of DESIGN section 3, in bytes and seconds."""

from __future__ import annotations

import pytest
from support.plans.mesh import mesh_of

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.comm.conversion_costs import conversion_cost
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.ir.graph import Value
from autopar.ir.placement import parse_placements

X = Value("x", ("B", 4096, 4096), "bfloat16", True)
FULL = 8 * 4096 * 4096 * 2 / 2
"""Bytes that a group of the second axis sees: the batch of 8 is cut in two on the first."""

TABLE = [
    ("S(1)", "R", "all_gather", "reduce_scatter", 2, 2),
    ("S(1)", "I", "all_gather", "slice", 2, 2 / 4),
    ("S(1)", "S(2)", "all_to_all", "all_to_all", 4 / 4, 4 / 4),
    ("P", "R", "all_reduce", "all_reduce", 0, 0),
    ("P", "I", "all_reduce", None, 0, 0),
    ("P", "S(1)", "reduce_scatter", "all_gather", 2, 2),
    ("I", "R", None, "all_reduce", 0, 0),
    ("I", "S(1)", "slice", "all_gather", 2 / 4, 2),
    ("R", "S(1)", "slice", "pad", 2 / 4, 5 / 4),
    ("I", "P", "mask", None, 2, 0),
    ("R", "P", "mask", "mask", 2, 2),
    ("R", "I", None, "scale", 0, 2),
    ("S(1)", "P", "pad", "slice", 5 / 4, 2 / 4),
]


@pytest.mark.parametrize(("source", "target", "forward", "backward", "copied", "copied_back"), TABLE)
def test_table(source: str, target: str, forward: str | None, backward: str | None, copied: float, copied_back: float) -> None:
    cluster, mesh = Cluster.parse("dgx-h100:1"), mesh_of(dp=2, tp=4)
    cost = conversion_cost(X, parse_placements(f"S(0) {source}"), parse_placements(f"S(0) {target}"), mesh, 8, cluster)
    rate = cluster.device.bandwidth_bytes_per_second * cluster.device.bandwidth_fraction
    link = links_of_axis(cluster, mesh, 1)
    assert (cost.axis, cost.forward_kind, cost.backward_kind, cost.full_bytes) == (1, forward, backward, FULL)
    for kind, seconds in ((forward, cost.forward_comm_seconds), (backward, cost.backward_comm_seconds)):
        moves = kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        assert seconds == (collective_seconds(str(kind), FULL, link) if moves else 0)
    assert cost.forward_local_seconds == pytest.approx(copied * FULL / rate)
    assert cost.backward_local_seconds == pytest.approx(copied_back * FULL / rate)


def test_gathers_along_the_first_dimension_copy_nothing() -> None:
    cluster, mesh = Cluster.parse("dgx-h100:1"), mesh_of(dp=2, tp=4)
    weight = Value("w", (4096, 4096), "bfloat16", True)
    cost = conversion_cost(weight, parse_placements("R S(0)"), parse_placements("R R"), mesh, 8, cluster)
    assert cost.forward_local_seconds == cost.backward_local_seconds == 0 < cost.forward_comm_seconds


def test_no_gradient_no_backward() -> None:
    cluster, mesh = Cluster.parse("dgx-h100:1"), mesh_of(dp=2, tp=4)
    ids = Value("ids", ("B", 4096), "int64")
    cost = conversion_cost(ids, parse_placements("S(0) S(1)"), parse_placements("S(0) R"), mesh, 8, cluster)
    assert cost.backward_seconds == 0 and cost.backward_kind is None


def test_one_rank_is_free() -> None:
    cluster, mesh = Cluster.parse("dgx-h100:1"), mesh_of(dp=8, tp=1)
    cost = conversion_cost(X, parse_placements("S(0) I"), parse_placements("S(0) S(1)"), mesh, 8, cluster)
    assert cost.forward_seconds == cost.backward_seconds == 0


@pytest.mark.parametrize(("source", "target"), [("R I", "S(0) R"), ("R R", "R R"), ("R P", "R P(max)")])
def test_what_is_no_arc(source: str, target: str) -> None:
    with pytest.raises(ValueError):
        conversion_cost(
            X, parse_placements(source), parse_placements(target), mesh_of(dp=2, tp=4), 8, Cluster.parse("dgx-h100:1")
        )
