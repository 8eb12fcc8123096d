"""What `explain` says adds up to what the evaluator says, and a question is answered by a search of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.solver_graphs import llama_graph

from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.errors import AutoparError, Infeasible
from autopar.explain.operation_and_collective_rows import collective_rows, module_path, offload_rows, operation_rows
from autopar.explain.reasons import evaluate_changes, parts_of_step, plan_reasons
from autopar.explain.what_if import WhatIf, compare_plans, parse_what_if, plan_what_if
from autopar.solve.search import search
from autopar.solve.space.force import Force
from autopar.solve.space.options import SearchOptions


@pytest.fixture(scope="module")
def planned():
    graph = llama_graph(layers=4, batch=32, seq=512, hidden=1024, heads=8, kv_heads=4)
    cluster = Cluster.parse("dgx-h100:1")
    return graph, cluster, search(graph, cluster, SearchOptions(force={"tp": 4}))


def test_operations_add_up_to_the_computing_time(planned) -> None:
    graph, cluster, found = planned
    breakdown = cost_breakdown(graph, found.candidate, cluster, "adamw")
    costs, ranked = breakdown.costs, operation_rows(graph, breakdown)
    local = sum(
        graph.count(block.name) * (cost.forward_local_seconds + cost.backward_local_seconds)
        for block in graph.blocks
        for each in found.candidate.block(block.name).conversions
        for cost in [costs[block.name].conversion(each.value, each.source, each.target)]
    )
    assert sum(cost.seconds for cost in ranked) + local == pytest.approx(found.evaluation.compute_seconds, rel=1e-9)
    assert [cost.seconds for cost in ranked] == sorted((cost.seconds for cost in ranked), reverse=True)


def test_collectives_add_up_to_the_time_of_each_model_axis(planned) -> None:
    graph, cluster, found = planned
    ranked = collective_rows(graph, cost_breakdown(graph, found.candidate, cluster, "adamw"))
    by_axis = {name: sum(cost.seconds for cost in ranked if cost.axis == name) for name in found.candidate.mesh.names}
    assert by_axis["tp"] == pytest.approx(dict(found.evaluation.axis_seconds)["tp"], rel=1e-9)
    assert any("layers.*" in cost.where for cost in ranked)


def test_parts_add_up_to_the_step(planned) -> None:
    evaluation = planned[2].evaluation
    assert sum(seconds for _, seconds in parts_of_step(evaluation)) == pytest.approx(evaluation.step_seconds, rel=1e-4)


def test_memory_is_said_to_bind_only_where_it_does(planned) -> None:
    graph, cluster, found = planned
    assert "does not bind" in " ".join(plan_reasons(graph, found.candidate, cluster, found.evaluation))
    stage = replace(found.evaluation.fullest_stage, budget_bytes=found.evaluation.peak_memory_bytes + 1)
    tight = replace(found.evaluation, stage_memory=(stage,))
    assert "memory binds" in " ".join(plan_reasons(graph, found.candidate, cluster, tight))


def test_memory_binds_where_a_plan_saves_memory_to_fit(planned) -> None:
    """A plan that fits because it recomputes and offloads said "memory does not bind; recomputed to save memory", and had no
    row for what is copied to the host."""
    graph, cluster, found = planned
    layer = max(graph.blocks, key=lambda block: graph.count(block.name)).name
    plan = next(each for each in found.candidate.blocks if each.block == layer)
    costs = BlockCosts(graph.block(layer), found.candidate.mesh, found.candidate.micro_batch, cluster)
    saved = RecomputePlan.of(costs, plan).saved
    largest = max(saved, key=lambda placed: saved[placed])
    changed = replace(plan, offload=(largest,))
    candidate = replace(
        found.candidate, blocks=tuple(changed if each.block == layer else each for each in found.candidate.blocks)
    )
    evaluation = evaluate(graph, candidate, cluster)
    assert evaluation.peak_memory_bytes < found.evaluation.peak_memory_bytes
    between = (evaluation.peak_memory_bytes + found.evaluation.peak_memory_bytes) / 2
    for capacity, words in ((2e10, "memory does not bind; tensors of"), (between, "memory binds; tensors of")):
        device = replace(cluster.device, memory_bytes=int(capacity / (1 - cluster.device.memory_margin)))
        small = replace(cluster, device=device)
        text = " ".join(plan_reasons(graph, candidate, small, evaluate(graph, candidate, small)))
        assert words in text and "without that the peak would take" in text
    breakdown = cost_breakdown(graph, candidate, cluster, "adamw")
    (row,) = offload_rows(graph, breakdown)
    times = graph.count(layer) * candidate.micro_batches
    assert cluster.host is not None
    both = saved[largest] / cluster.host.write_bytes_per_second + saved[largest] / cluster.host.read_bytes_per_second
    assert row.times == times and row.full_bytes == saved[largest] and row.seconds == pytest.approx(times * both)
    parts = dict(parts_of_step(evaluation))
    assert sum(parts.values()) == pytest.approx(evaluation.step_seconds, rel=1e-4)
    slow = replace(cluster, host=replace(cluster.host, write_bytes_per_second=1e8))
    stalled = evaluate(graph, candidate, slow)
    assert stalled.host_stall_seconds > 0
    assert dict(parts_of_step(stalled))["exposed copies to host memory and back"] == stalled.host_stall_seconds


def test_changes_are_priced_by_the_evaluator(planned) -> None:
    graph, cluster, found = planned
    by_name = {change.name: change for change in evaluate_changes(graph, found.candidate, cluster, "adamw")}
    plain = replace(found.candidate, blocks=tuple(replace(plan, zero=0) for plan in found.candidate.blocks))
    assert by_name["ZeRO-0 for all blocks"].step_seconds == evaluate(graph, plain, cluster).step_seconds
    whole = by_name["repeated blocks recomputed whole"]
    assert whole.step_seconds > found.evaluation.step_seconds


def test_a_question_is_planned_again(planned) -> None:
    graph, cluster, found = planned
    changed, answer = plan_what_if(graph, cluster, SearchOptions(), parse_what_if("tp=2,pp=1,batch=16"))
    assert answer.candidate.mesh.size_of("tp") == 2 and answer.candidate.batch == 16 and changed == cluster
    larger, wide = plan_what_if(graph, cluster, SearchOptions(), WhatIf(Force({"tp": 2, "pp": 1}), nodes=2, batch=16))
    assert larger.size == 16 == wide.candidate.devices == wide.candidate.mesh.size
    plans = (found.candidate, found.evaluation), (wide.candidate, wide.evaluation)
    rows = {what: (before, after) for what, before, after in compare_plans(*plans, (8, 16))}
    assert rows["mesh"] == (str(found.candidate.mesh), str(wide.candidate.mesh))
    with pytest.raises(Infeasible):
        plan_what_if(graph, cluster, SearchOptions(), WhatIf(memory_gib=0.001))


@pytest.mark.parametrize("text", ["tp=two", "memory=much", "nodes=0", "speed=9"])
def test_a_question_that_is_none(text: str) -> None:
    with pytest.raises(AutoparError, match="what-if|force"):
        parse_what_if(text)


def test_places_of_equal_layers_share_one_path(planned) -> None:
    graph = planned[0]
    assert module_path(graph, graph.calls[1].block, "mlp.up_proj") == "layers.*.mlp.up_proj"
