"""A model axis that cuts the batch too: data parallelism as placements, beside tensor parallelism on the same axis."""

from __future__ import annotations

import pytest
from support.harness.end_to_end import check_programs, prepare, program
from support.harness.rank_pool import RankPool

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Precision
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

FORCES = {"dp=2,ep=2": {"dp": 2, "ep": 2}, "ep=4": {"ep": 4}, "ep=2,tp=2": {"ep": 2, "tp": 2, "dp": 1}}


@pytest.mark.parametrize("name,value", [("gpt2", "add"), pytest.param("convnet_bn", "relu", marks=pytest.mark.slow)])
def test_equals_one_process(name: str, value: str, ranks: RankPool) -> None:
    """Activations are pinned to be cut by examples: every parameter's gradient is then a sum over the axis."""
    prepared = prepare(name)
    programs = []
    for force in FORCES.values():
        pins = {value: {"ep": "S(0)"} if len(force) < 3 else {"ep": "S(0)", "tp": "I"}}
        options = SearchOptions(batch=16, precision=Precision("float64", "float64"), force={"pp": 1, **force}, pins=pins)
        result = search(prepared.graph, Cluster.parse("local:4"), options)
        programs.append(program(prepared, result))
        assert "ep" in programs[-1]
    check_programs(ranks, prepared, programs, FORCES)


def test_refused_for_a_batch_that_does_not_divide() -> None:
    """16 examples on 4 data ranks do not divide by 8; an error says so."""
    prepared = prepare("gpt2")
    options = SearchOptions(batch=16, precision=Precision("float64", "float64"), force={"pp": 1, "dp": 4, "ep": 8})
    with pytest.raises(Exception, match="ep=8 shards the batch"):
        search(prepared.graph, Cluster.parse("local:32"), options)
