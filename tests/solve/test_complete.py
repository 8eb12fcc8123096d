"""A complete configuration: what counts as one, and that it is priced as given."""

from __future__ import annotations

import pytest
from support.blocks import gpt2_graph

from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError
from autopar.ir.plan import Precision
from autopar.ir.verify import verify_candidate
from autopar.rules.registry import default_registry
from autopar.solve.complete import complete, priced
from autopar.solve.ilp import Status

WHOLE = "tp=2,pp=1,zero=3,micro_batches=2,recompute=full,zero_group=0,sequence_parallel=1"


def test_degrees_alone_are_for_the_search() -> None:
    assert complete("", Precision(), "adamw") is None
    assert complete({"tp": 4, "zero": 3}, Precision(), "adamw") is None
    assert complete("pp=2,virtual=2,schedule=1f1b,micro=1", Precision(), "adamw") is None


@pytest.mark.parametrize(
    ("force", "said"),
    [
        ("micro_batches=2", "tp, pp, zero, recompute, zero_group, sequence_parallel missing"),
        (WHOLE + ",schedule=best", "schedule=best is none of"),
        (WHOLE + ",tp2=2", "tp2 not among them"),
        (WHOLE.replace("full", "some"), "recompute=some is none of"),
        (WHOLE.replace("zero=3", "zero=4"), "zero=4"),
        (WHOLE.replace("tp=2", "tp=0"), "tp=0"),
    ],
)
def test_refusals_are_one_line(force: str, said: str) -> None:
    with pytest.raises(AutoparError, match=said) as caught:
        complete(force, Precision(), "adamw")
    assert "\n" not in str(caught.value)


def test_the_candidate_is_the_configuration() -> None:
    graph, cluster = gpt2_graph(layers=3, batch=16), Cluster.parse("dgx-h100:1")
    wanted = complete(WHOLE, Precision(), "adamw")
    assert wanted is not None
    found = priced(graph, cluster, wanted, default_registry())
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
    wanted = complete(at_once, Precision(), "adamw")
    assert wanted is not None
    found = priced(graph, cluster, wanted, default_registry())
    assert found.status is Status.INFEASIBLE and not found.evaluation.fits
