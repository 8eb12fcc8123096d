"""Prices of compiled plans under schedules that split the backward: blocks whose plan says what is saved run uncompiled there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_compiled
from support.models.solver_graphs import llama_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept
from support.plans.handwritten_candidates import candidate
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.evaluate import evaluate, stage_traces
from autopar.ir.graph import Graph
from autopar.ir.plan import BlockPlan, Candidate, Pipeline, Precision
from autopar.program.build import program_text
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

BF16 = Precision("bfloat16", "float32")
EAGER = Cluster.parse("dgx-h100:1")
COMPILED = with_compilation(EAGER, True)
SPLIT = Pipeline(4, 1, "zb-h1")


@cache
def graph_of() -> Graph:
    return llama_graph(layers=8, batch=64, seq=2048, hidden=2048, heads=16, ffn=5632)


def planned(pipeline: Pipeline, change: Callable[[BlockPlan], BlockPlan] = lambda plan: plan) -> Candidate:
    made = candidate(graph_of(), 1, None, BF16, dp=2)
    return replace(made, blocks=tuple(map(change, made.blocks)), micro_batches=8, pipeline=pipeline)


def recomputed(plan: BlockPlan) -> BlockPlan:
    return replace(plan, recompute=True)


def offloaded(plan: BlockPlan) -> BlockPlan:
    """Its first input is saved on the host."""
    block = graph_of().block(plan.block)
    return replace(plan, offload=((block.inputs[0].name, plan.inputs[0]),))


@pytest.mark.parametrize("change", [recomputed, offloaded])
def test_blocks_that_say_what_is_saved_cost_what_eager_ones_do(change: Callable[[BlockPlan], BlockPlan]) -> None:
    """Every block has products here, so that the whole step is eager, seconds and bytes, on a device with fractions of its own,
    where nothing but the fusion is another; of a preset the blocks are, and the update is that of compiled programs."""
    eager = replace(EAGER, device=replace(EAGER.device, matmul_fraction=0.7))
    split, whole = planned(SPLIT, change), planned(replace(SPLIT, schedule="1f1b"), change)
    assert evaluate(graph_of(), split, with_compilation(eager, True)) == evaluate(graph_of(), split, eager)
    found, wanted = (stage_traces(graph_of(), split, each)[0] for each in (COMPILED, EAGER))
    for name, trace in found.items():
        other = wanted[name]
        assert (trace.forward, trace.backward, trace.memory) == (other.forward, other.backward, other.memory)
    first, second = (evaluate(graph_of(), whole, each) for each in (COMPILED, EAGER))
    assert first.step_seconds < second.step_seconds and first.peak_memory_bytes <= second.peak_memory_bytes


def test_other_blocks_stay_compiled() -> None:
    """Without a plan of what is saved products interrupt the graph, and what stands between them is compiled."""
    compiled, eager = (evaluate(graph_of(), planned(SPLIT), each) for each in (COMPILED, EAGER))
    assert compiled.step_seconds < eager.step_seconds
    one = planned(SPLIT, lambda plan: recomputed(plan) if plan.block == "Epilogue" else plan)
    traces = stage_traces(graph_of(), one, COMPILED)[0]
    fused = {name: trace.costs.cluster.device.fused for name, trace in traces.items()}
    assert fused == {"Prologue": True, "LlamaDecoderLayer": True, "Epilogue": False}


def test_frozen_weights_have_no_action_of_their_own() -> None:
    """So their products stay in the graph."""
    graph = graph_of()
    frozen = tuple(replace(each, parameters=tuple(replace(p, trainable=False) for p in each.parameters)) for each in graph.blocks)
    traces = stage_traces(replace(graph, blocks=frozen), planned(SPLIT, recomputed), COMPILED)[0]
    assert all(trace.costs.cluster.device.fused for trace in traces.values())


@pytest.mark.parametrize("name", ["zb-h1", pytest.param("zbv", marks=pytest.mark.slow)])
def test_the_search_prices_what_runs(name: str) -> None:
    """Where memory is short: the plan that it takes is right about itself (as compiled it would take 0.46 s, and takes 0.56)."""
    small = replace(COMPILED, device=replace(COMPILED.device, memory_bytes=10 * 2**30))
    graph = llama_graph(layers=16, batch=16, seq=8192, hidden=2048, heads=16, ffn=5632)
    found = search(graph, small, SearchOptions(precision=BF16, force={"pp": 4}, schedule=name))
    assert found.graph is not None
    assert any(plan.recompute or plan.recompute_nodes for plan in found.candidate.blocks)
    again = evaluate(found.graph, found.candidate, small)
    assert found.evaluation == again and again.fits
    assert found.lower_bound_seconds <= again.step_seconds
    traces = stage_traces(found.graph, found.candidate, small)[0]
    for plan in found.candidate.blocks:
        chosen = plan.recompute or plan.recompute_nodes or plan.offload or plan.partition_saved
        assert traces[plan.block].costs.cluster.device.fused == (not chosen)


def test_compiled_is_never_slower(subtests: pytest.Subtests) -> None:
    """Bounds of compiled blocks hold for blocks that are not."""
    for change in (recomputed, offloaded, lambda plan: plan):
        with subtests.test(change=change):
            each = planned(replace(SPLIT, schedule="1f1b"), change)
            compiled, eager = (stage_traces(graph_of(), each, cluster)[0] for cluster in (COMPILED, EAGER))
            for name, trace in compiled.items():
                assert sum(s for s, _ in trace.forward) <= sum(s for s, _ in eager[name].forward)
                assert sum(s for s, _ in trace.backward) <= sum(s for s, _ in eager[name].backward)
                assert trace.memory.internal_saved_bytes <= eager[name].memory.internal_saved_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_programs_run_as_they_are_priced(schedule: str, ranks: RankPool) -> None:
    """The runtime says which blocks it does not compile: those that are priced as eager."""
    prepared = prepare("gpt2", batch=8)
    cluster = Cluster.parse("local:2")
    plain = drawn_candidate(prepared.graph, mesh_of(dp=1), 1, zero=0, wild=0.0, precision=Precision("float64", "float64"))
    kept = with_kept(prepared.graph, plain, Cluster.parse("local:1"), 1, share=0.3)
    split = replace(kept, micro_batches=2, pipeline=Pipeline(2, 1, schedule))
    traces = stage_traces(prepared.graph, split, with_compilation(cluster, True))[0]
    eager = {name for name, trace in traces.items() if not trace.costs.cluster.device.fused}
    case = program_text(prepared.graph, split), prepared.state, prepared.batch
    found = ranks.run(train_compiled, [case], "aot_eager", world=2, timeout=200)
    said = {line.split()[2].rstrip(",") for _, lines in found for line in lines}
    assert said == eager and bool(eager) == (schedule == "zb-h1")
