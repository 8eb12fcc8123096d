"""The number at the end of each printed formula is the evaluator's price of that operation or collective."""

from __future__ import annotations

import re

import pytest
from support.solving import llama_graph

from autopar.cost_models.evaluate import evaluate
from autopar.cost_models.hardware import Cluster
from autopar.explain.formulas import formulas_of
from autopar.explain.ranking import block_costs, collectives, operations
from autopar.solve.forced import Forced, forced


def printed(text: str) -> float:
    return float(re.findall(r"= ([-+.e\d]+) seconds", text)[-1])


@pytest.fixture(scope="module", params=["dgx-h100:1", "local:4"])
def priced(request):
    graph = llama_graph(layers=3, batch=16, seq=256, hidden=512, heads=8, kv_heads=4, ffn=1024)
    cluster = Cluster.parse(request.param)
    wanted = Forced(tp=2, sequence_parallel=True, zero=3, micro_batches=2)
    candidate = forced(graph, cluster, wanted)
    return graph, candidate, block_costs(graph, candidate, cluster), evaluate(graph, candidate, cluster)


def test_operations(priced) -> None:
    graph, candidate, costs, _ = priced
    products = 0
    for cost in operations(graph, candidate, costs):
        lines = {name: (number, text) for name, number, text in formulas_of(cost, costs)}
        found = costs[cost.block].node(cost.plan)
        for name, seconds in (("forward", found.forward_seconds), ("backward", found.backward_seconds)):
            assert lines.get(name, (0.0, ""))[0] == pytest.approx(seconds, rel=1e-9)
            assert not seconds or printed(lines[name][1]) == pytest.approx(seconds, rel=1e-5)
        if "arithmetic of the forward" in lines:
            products += 1
            inserted = re.search(r"= Max\(([-+.e\d]+),", lines["forward"][1])
            assert inserted is not None
            assert float(inserted[1]) == pytest.approx(lines["arithmetic of the forward"][0], rel=1e-5)
    assert products >= 10


def test_collectives(priced) -> None:
    graph, candidate, costs, evaluation = priced
    ranked = collectives(graph, candidate, costs, evaluation)
    assert {cost.axis for cost in ranked} == {"dp", "tp"}
    for cost in ranked:
        lines = list(formulas_of(cost, costs))
        assert lines or cost.what.startswith("inside ")
        if lines:
            assert sum(number for _, number, _ in lines) * cost.times == pytest.approx(cost.seconds, rel=1e-9)
            assert all(printed(text) == pytest.approx(number, rel=1e-5) for _, number, text in lines)
