"""Saved tensors in parts over a model axis (ZeRO-R): the integer program against every plan, and what the search takes it for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from solve.test_joint import BF16, NODE, attempt, least, problem_of, with_memory
from support.models.handwritten_blocks import gpt2_graph
from support.oracles.exhaustive_plans import best_seconds, priced_plans, toy_graph
from support.plans.drawn_recomputation import with_partition
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.verify import verify_candidate
from autopar.solve.bounds.memory_frontier import with_fixed_placements
from autopar.solve.ilp import recompute_offload
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.storages import partition_axes
from autopar.solve.problem.problem import Problem
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


def whole_problem(micro_batches: int = 1) -> Problem:
    """Nothing of it divides over the four ranks of tp: every tensor is whole on each of them."""
    graph = toy_graph(batch=1, seq=65535, width=1023, calls=6)
    return problem_of(graph, mesh_of(dp=1, tp=4), replace(NODE, size=4, host=None), micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_optimum_of_all_plans(micro_batches: int) -> None:
    """What is saved whole, saved in parts or recomputed, with the placements of the fastest plan: every combination by the
    evaluator."""
    problem = whole_problem(micro_batches)
    sharding = attempt(with_memory(problem, 2**50)).plan.candidate  # type: ignore[union-attr]
    problem = with_fixed_placements(problem, sharding)
    plans = priced_plans(problem, [sharding])
    peaks = sorted({found.peak_memory_bytes for _, found in plans})
    assert len(plans) >= 18 and any(plan.partition_saved for candidate, _ in plans for plan in candidate.blocks)
    parts = 0
    for capacity in (peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2], peaks[-1]):
        result = attempt(with_memory(problem, capacity))
        assert result.solved and result.plan is not None
        assert result.plan.evaluation.step_seconds == pytest.approx(best_seconds(plans, capacity), rel=1e-6)
        assert result.objective_seconds == pytest.approx(result.plan.evaluation.step_seconds, rel=1e-3)
        verify_candidate(problem.graph, result.plan.candidate)
        parts += any(plan.partition_saved for plan in result.plan.candidate.blocks)
        if capacity == peaks[-1]:
            assert not any(plan.partition_saved for plan in result.plan.candidate.blocks)
    assert parts


def test_the_rows_count_what_the_evaluator_counts() -> None:
    """The rows' least peak is the evaluator's, of a plan that saves in parts."""
    problem = whole_problem()
    rows, plan = least(problem)
    assert any(block.partition_saved for block in plan.blocks)
    peak = evaluate(problem.graph, plan, problem.cluster, costs=problem.batch_costs).peak_memory_bytes
    assert rows == pytest.approx(peak - problem.cluster.device.base_bytes, rel=0.02)


def test_what_a_partition_costs() -> None:
    """A call saves a quarter, copies that in the forward, and in the backward holds and waits for the whole."""
    problem = whole_problem()
    table, graph = problem.blocks["Middle"], problem.graph
    plain = attempt(with_memory(problem, 2**50)).plan.candidate  # type: ignore[union-attr]
    parts = with_partition(graph, plain, problem.cluster, "tp")
    before, after = (CallTrace.of(table.costs, each.block("Middle")) for each in (plain, parts))
    sizes = [table.costs.value_bytes(value, at) for value, at, _ in parts.block("Middle").partition_saved]
    given = table.costs.value_bytes("hidden", plain.block("Middle").inputs[0])
    saved = before.memory.internal_saved_bytes + sum(size for _, size in before.memory.boundary_saved_bytes)
    assert len(sizes) == 3 and saved == pytest.approx(sum(sizes))
    assert after.memory.internal_saved_bytes == pytest.approx(sum(sizes) / 4) and not after.memory.boundary_saved_bytes
    assert after.memory.forward_bytes == pytest.approx(before.memory.forward_bytes + sum(sizes) / 4 + given)
    assert after.memory.backward_bytes == pytest.approx(before.memory.backward_bytes + sum(sizes))
    copies, gathers = (sum(each) for each in zip(*(table.costs.partition_seconds(1, size) for size in sizes), strict=True))
    assert after.seconds(backward=False, exposed=False) == pytest.approx(before.seconds(backward=False, exposed=False) + copies)
    assert after.axis_seconds[1] == pytest.approx(before.axis_seconds[1] + gathers)
    assert after.seconds(backward=True, exposed=True) > before.seconds(backward=True, exposed=True)


def long_gpt2(seq: int) -> Graph:
    return gpt2_graph(layers=8, dtype="bfloat16", batch=32, hidden=4096, heads=32, seq=seq, vocabulary=4096)


def searched(graph: Graph, memory_bytes: float) -> PlanResult:
    """Two stages of four ranks, one example in a micro-batch."""
    cluster: Cluster = replace(NODE, host=None, device=replace(NODE.device, memory_bytes=int(memory_bytes)))
    force = {"pp": 2, "tp": 4, "micro": 1}
    return search(graph, cluster, SearchOptions(batch=32, precision=BF16, force=force, time_limit_seconds=120))


def in_parts(candidate: Candidate) -> bool:
    return any(plan.partition_saved for plan in candidate.blocks)


def test_the_search_takes_it_where_it_is_faster_and_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences whose length the tensor axis does not divide, the inputs of layers are whole on each of its ranks."""
    graph = long_gpt2(4095)
    with_it = {size: searched(graph, size) for size in (80e9, 5.8e9, 5.7e9)}
    monkeypatch.setattr(recompute_offload, "partition_axes", lambda problem, table: {})
    assert not in_parts(with_it[80e9].candidate) and in_parts(with_it[5.8e9].candidate) and in_parts(with_it[5.7e9].candidate)
    without = searched(graph, 5.8e9)
    assert not in_parts(without.candidate)
    assert with_it[5.8e9].evaluation.step_seconds < 0.97 * without.evaluation.step_seconds
    with pytest.raises(Infeasible):
        searched(graph, 5.7e9)


def test_where_placements_do_it_nothing_is_added() -> None:
    """Where the sequence divides, its operations may be sharded, so no tensor of a layer that is worth it has a variable."""
    graph = gpt2_graph(layers=2, dtype="bfloat16", batch=1, hidden=512, heads=8, seq=512, vocabulary=1024)
    problem = problem_of(graph, mesh_of(dp=1, tp=4), replace(NODE, size=4, host=None))
    form = formulate(problem, recompute=True)
    assert not any(storages.partitioned for storages in form.storages.values())
    layer = problem.blocks["GPT2Block"]
    assert not {node.name for node in layer.block.nodes if node.op == "aten.layer_norm"} & partition_axes(problem, layer).keys()
    assert isinstance(layer.costs, BlockCosts)
