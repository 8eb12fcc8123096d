"""What is ahead by less than the cost models can tell is not chosen: the simpler plan is, with more memory left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.models.solver_graphs import llama_graph
from support.plans.drawn_recomputation import with_partition

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.errors import PlanError
from autopar.ir.plan import Candidate
from autopar.solve.choice import complexity, robust_choice
from autopar.solve.fixed.baselines import baselines
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.result import PlanResult
from autopar.solve.space.options import SearchOptions

GRAPH = llama_graph(layers=4, batch=32, seq=512, hidden=1024, heads=8, kv_heads=4)
CLUSTER = Cluster.parse("dgx-h100:1")
BLOCK = GRAPH.calls[1].block


def priced(configuration: FixedConfiguration, seconds: float, used: float) -> tuple[Candidate, Evaluation]:
    """A configuration as if its step took `seconds` and the share `used` of the memory."""
    candidate = fixed_candidate(GRAPH, CLUSTER, configuration)
    found = evaluate(GRAPH, candidate, CLUSTER)
    stage = replace(found.fullest_stage, capacity_bytes=int(found.peak_memory_bytes / used))
    return candidate, replace(found, step_seconds=seconds, stage_memory=(stage,))


def with_offload(candidate: Candidate) -> Candidate:
    """A saved tensor of each layer goes to the host."""
    for node in candidate.block(BLOCK).nodes:
        offload = ((node.node, node.results[0]),)
        blocks = tuple(replace(plan, offload=offload) if plan.block == BLOCK else plan for plan in candidate.blocks)
        changed = replace(candidate, blocks=blocks)
        try:
            evaluate(GRAPH, changed, CLUSTER)
        except PlanError:  # it is not saved
            continue
        return changed
    raise AssertionError


def with_parts(candidate: Candidate) -> Candidate:
    """Each rank of tp saves a part of what all of them would save whole."""
    changed = with_partition(GRAPH, candidate, CLUSTER, "tp", 2.0**20)
    assert any(plan.partition_saved for plan in changed.blocks)
    return changed


def result(*plans: tuple[Candidate, Evaluation]) -> PlanResult:
    """A search that found these, the fastest one first."""
    solutions = tuple(PricedPlan(candidate, evaluation).solution() for candidate, evaluation in plans)
    candidate, evaluation = plans[0]
    return PlanResult(
        graph=GRAPH,
        candidate=candidate,
        evaluation=evaluation,
        status=Status.OPTIMAL,
        lower_bound_seconds=0.9,
        gap=0.1,
        solutions=solutions,
        alternatives=solutions,
    )


def choose(*plans: tuple[Candidate, Evaluation]) -> PlanResult:
    return robust_choice(GRAPH, CLUSTER, SearchOptions(indifference=0.02), result(*plans))


PLAIN = FixedConfiguration(zero=3)
TWO = FixedConfiguration(zero=3, tp=2)


@pytest.mark.parametrize(("seconds", "is_chosen"), [(1.005, True), (1.03, False)])
@pytest.mark.parametrize("saved_elsewhere", [with_offload, with_parts])
def test_offloading_must_earn_it(
    seconds: float, is_chosen: bool, saved_elsewhere: Callable[[Candidate], Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a plan half a percent slower, and against one that is 3 % slower; and to save tensors in parts."""
    monkeypatch.setattr("autopar.solve.choice._with_saved_or_recomputed", lambda *_: ())
    candidate, evaluation = priced(TWO, 1.0, 0.99)
    plain = priced(replace(TWO, micro_batches=2), seconds, 0.7)
    found = choose((saved_elsewhere(candidate), evaluation), plain)
    assert (found.candidate == plain[0]) == is_chosen == (found.fastest is not None)
    if found.fastest is not None:
        assert found.fastest.step_seconds == 1.0 and found.gap == pytest.approx(1 - 0.9 / 1.005)


def test_an_offloaded_tensor_that_brings_little_is_saved_or_recomputed() -> None:
    candidate = with_offload(fixed_candidate(GRAPH, CLUSTER, PLAIN))
    found = choose((candidate, evaluate(GRAPH, candidate, CLUSTER)))
    assert not any(plan.offload for plan in found.candidate.blocks)
    assert found.evaluation.fits and found.evaluation.step_seconds == evaluate(GRAPH, found.candidate, CLUSTER).step_seconds


def test_a_tensor_in_parts_that_brings_little_is_saved_whole() -> None:
    candidate = with_parts(fixed_candidate(GRAPH, CLUSTER, TWO))
    found = choose((candidate, evaluate(GRAPH, candidate, CLUSTER)))
    assert not any(plan.partition_saved for plan in found.candidate.blocks)


@pytest.mark.parametrize(
    "configuration",
    [
        FixedConfiguration(tp=2, sequence_parallel=True, zero=3),
        FixedConfiguration(zero=3, zero_group=2),
        FixedConfiguration(pp=2, zero=1, micro_batches=4),
    ],
    ids=["tensor axis", "state groups", "pipeline"],
)
def test_what_is_more_complex_must_earn_it(configuration: FixedConfiguration) -> None:
    plain = priced(PLAIN, 1.005, 0.7)
    assert choose(priced(configuration, 1.0, 0.7), plain).candidate == plain[0]
    assert choose(priced(configuration, 1.0, 0.7), priced(PLAIN, 1.05, 0.7)).candidate != plain[0]


def test_an_unusual_schedule_must_earn_it() -> None:
    usual = priced(FixedConfiguration(pp=2, zero=1, micro_batches=4), 1.005, 0.7)
    pipeline = replace(usual[0].pipeline, schedule="zb_h1")
    unusual = replace(usual[0], pipeline=pipeline), replace(usual[1], step_seconds=1.0)
    assert complexity(unusual[0]) == complexity(usual[0]) + 2
    assert choose(unusual, usual).candidate == usual[0]


def test_of_equally_simple_plans_the_one_with_more_memory_left() -> None:
    full, empty = priced(PLAIN, 1.0, 0.97), priced(replace(PLAIN, micro_batches=2), 1.005, 0.7)
    assert choose(full, empty).candidate == empty[0]
    nearly = priced(PLAIN, 1.0, 0.71)
    assert choose(nearly, empty).candidate == nearly[0] and choose(nearly, empty).fastest is None


def test_plain_data_parallelism_is_an_alternative_where_nothing_is_forced() -> None:
    (recipe,) = (each for each in baselines(GRAPH, CLUSTER, SearchOptions()) if each.recipe.key == "fsdp")
    assert recipe.evaluation is not None and recipe.configuration is not None
    complex_plan = priced(FixedConfiguration(tp=2, sequence_parallel=True, zero=3), recipe.evaluation.step_seconds / 1.01, 0.5)
    found = result(complex_plan)
    chosen = robust_choice(GRAPH, CLUSTER, SearchOptions(), found, [recipe])
    assert chosen.candidate == recipe.candidate and chosen.fastest is not None
    forced = SearchOptions(force={"tp": 2})
    assert robust_choice(GRAPH, CLUSTER, forced, found, [recipe]).candidate == complex_plan[0]
