"""What can be forced, and that a fixed configuration is priced as given."""

from __future__ import annotations

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.plan import Precision
from autopar.ir.verify import verify_candidate
from autopar.rules.registry import default_registry
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.ilp.linear_model import Status
from autopar.solve.space.force import Force, parse_force

WHOLE = "tp=2,pp=1,zero=3,micro_batches=2,recompute=full,zero_group=0,sequence_parallel=1"


def test_degrees_alone_are_for_the_search() -> None:
    assert parse_force("") == Force({})
    assert parse_force({"tp": 4, "zero": 3}) == Force({"tp": 4, "zero": 3})
    assert parse_force("pp=2, virtual=2, schedule=1f1b, micro=1") == Force({"pp": 2, "virtual": 2, "micro": 1}, "1f1b")
    assert parse_force("pp=2,schedule=synthesized") == Force({"pp": 2}, synthesize=True)
    assert not parse_force("pp=2,schedule=1f1b").is_configuration and parse_force(WHOLE).is_configuration


@pytest.mark.parametrize(
    ("force", "said"),
    [
        ("micro_batches=2", "tp, pp, zero, recompute, zero_group, sequence_parallel missing"),
        (WHOLE + ",schedule=best", "no schedule 'best': write naive, gpipe"),
        (WHOLE + ",tp2=2", "tp2 not among them"),
        (WHOLE.replace("full", "some"), "recompute=some is none of"),
        ("tp=4,speed=9", "'speed' cannot be forced"),
        ("cp=2", "'cp' cannot be forced: a model axis .* shards the sequence where that is fastest; write tp=2"),
        ("schedule=synthesized", "pipeline: write its stages too, as in pp=2"),
        ("pp=1,schedule=synthesized", "write its stages too"),
        ("schedule=best", "no schedule 'best'.* or write synthesized"),
        ("tp=two", "tp=two is no degree"),
        ("zero=7", "zero=7 is no degree"),
        (WHOLE.replace("zero=3", "zero=4"), "zero=4"),
        (WHOLE.replace("tp=2", "tp=0"), "tp=0"),
    ],
)
def test_refusals_are_one_line(force: str, said: str) -> None:
    with pytest.raises(AutoparError, match=said) as caught:
        parse_force(force)
    assert "\n" not in str(caught.value)


def test_the_candidate_is_the_configuration() -> None:
    graph, cluster = gpt2_graph(layers=3, batch=16), Cluster.parse("dgx-h100:1")
    fixed = configuration_of(parse_force(WHOLE), Precision(), "adamw")
    found = price_configuration(graph, cluster, fixed, default_registry())
    candidate = found.candidate
    verify_candidate(graph, candidate, cluster.size)
    assert (candidate.mesh.size_of("tp"), candidate.mesh.size_of("dp"), candidate.micro_batches) == (2, 4, 2)
    assert {plan.zero for plan in candidate.blocks} == {3}
    repeated = [block.name for block in graph.blocks if graph.count(block.name) > 1]
    assert [plan.block for plan in candidate.blocks if plan.recompute] == repeated
    assert found.status is Status.OPTIMAL and found.gap == 0.0
    assert found.lower_bound_seconds == found.evaluation.step_seconds


def test_what_does_not_fit_is_priced_and_says_so() -> None:
    graph, cluster = gpt2_graph(layers=3, batch=4096), Cluster.parse("dgx-h100:1")
    at_once = WHOLE.replace("recompute=full", "recompute=none").replace("micro_batches=2", "micro_batches=1")
    fixed = configuration_of(parse_force(at_once), Precision(), "adamw")
    found = price_configuration(graph, cluster, fixed, default_registry())
    assert found.status is Status.INFEASIBLE and not found.evaluation.fits
