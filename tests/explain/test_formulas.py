"""The number at the end of each printed formula is the evaluator's cost of that operation or collective."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.models.solver_graphs import llama_graph

from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.measured_collectives import KINDS, STATE_KINDS, MeasuredCollective, PiecewiseLinear
from autopar.explain.operation_and_collective_rows import collective_rows, operation_rows, row_formulas
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration


def printed(text: str) -> float:
    return float(re.findall(r"= ([-+.e\d]+) seconds", text)[-1])


def with_tables(cluster: Cluster) -> Cluster:
    """Every kind of collective as it was measured among four."""
    table = PiecewiseLinear((2.0**12, 2.0**20, 2.0**26), (1e-3, 5e-3, 2.0))
    measured = tuple(MeasuredCollective(kind, 4, table) for kind in (*KINDS, *STATE_KINDS))
    return replace(cluster, links=(replace(cluster.links[0], measured=measured),))


@pytest.fixture(scope="module", params=["dgx-h100:1", "local:4", "local:4 measured"])
def priced(request):
    graph = llama_graph(layers=3, batch=16, seq=256, hidden=512, heads=8, kv_heads=4, ffn=1024)
    name, _, measured = request.param.partition(" ")
    cluster = with_tables(Cluster.parse(name)) if measured else Cluster.parse(name)
    wanted = FixedConfiguration(tp=2, sequence_parallel=True, zero=3, micro_batches=2)
    candidate = fixed_candidate(graph, cluster, wanted)
    return graph, cost_breakdown(graph, candidate, cluster, "adamw")


def test_operations(priced) -> None:
    graph, breakdown = priced
    products = 0
    for row in operation_rows(graph, breakdown):
        lines = {name: (number, text) for name, number, text in row_formulas(row, breakdown)}
        found = breakdown.costs[row.cost.block].node(row.cost.plan)
        for name, seconds in (("forward", found.forward_seconds), ("backward", found.backward_seconds)):
            assert lines.get(name, (0.0, ""))[0] == pytest.approx(seconds, rel=1e-9)
            assert not seconds or printed(lines[name][1]) == pytest.approx(seconds, rel=1e-5)
        if "arithmetic of the forward" in lines:
            products += 1
            inserted = [
                float(each) for each in re.findall(r"\d[.\d]*(?:e[-+]?\d+)?", lines["forward"][1].rpartition(" = Max(")[2])
            ]
            assert pytest.approx(lines["arithmetic of the forward"][0], rel=1e-5) in inserted
    assert products >= 10


def test_collectives(priced) -> None:
    graph, breakdown = priced
    rows = collective_rows(graph, breakdown)
    assert {row.axis for row in rows} == {"dp", "tp"}
    for row in rows:
        lines = list(row_formulas(row, breakdown))
        assert lines or row.what.startswith("inside ")
        if lines:
            assert sum(number for _, number, _ in lines) * row.times == pytest.approx(row.seconds, rel=1e-9)
            assert all(printed(text) == pytest.approx(number, rel=1e-5) for _, number, text in lines)
