"""Pipeline stages: what each owns, when it ends, what it holds at its peak; against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.handwritten_candidates import candidate

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.events.memory_terms import CallMemory
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_memory import StateMemory
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import ChunkCost, chunk_costs, owned_state
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.pipeline_clock import ChunkSeconds, run_schedule
from autopar.cost_models.step.stage_devices import stage_cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Candidate, Pipeline, Precision

BF16 = Precision("bfloat16", "float32")
CLUSTER = replace(Cluster.parse("dgx-h100:4"), overlap=Overlap())
"""Without contention, whose loss is no busy time."""
ADAMW = optimizer_named("adamw")


@lru_cache
def graph_of(layers: int = 8) -> Graph:
    return gpt2_graph(layers=layers, dtype="bfloat16", batch=128, hidden=1024, heads=16)


def plan_of(pipeline: Pipeline, zero: int = 1, many: int = 8) -> Candidate:
    made = candidate(graph_of(), zero, None, BF16, dp=32 // pipeline.stages)
    return replace(made, batch=128 * many, micro_batches=many, pipeline=pipeline)


def made_of(plan: Candidate) -> tuple[dict[str, CallTrace], tuple[ChunkCost, ...]]:
    part = stage_cluster(CLUSTER, plan.pipeline.stages)
    runs = {b.name: CallTrace.of(BlockCosts(b, plan.mesh, plan.micro_batch, part), plan.block(b.name)) for b in graph_of().blocks}
    return runs, chunk_costs(graph_of(), plan, CLUSTER, [runs] * plan.pipeline.stages, ADAMW)


def found_of(plan: Candidate) -> Evaluation:
    return evaluate(graph_of(), plan, CLUSTER)


def test_every_parameter_is_owned_once_and_shared_ones_together() -> None:
    """One chunk: the tied table is the root's, everything else its call's; two chunks: each has a copy of the table."""
    runs, _ = made_of(plan_of(Pipeline()))
    everything = range(len(graph_of().calls))
    whole = owned_state(tuple(everything), graph_of(), plan_of(Pipeline()), runs, ADAMW)
    table = 50304 * 1024
    assert whole.root.reduce_bytes == 4 * table
    elements = sum(state.reduce_bytes for state in (*whole.states, whole.root)) / 4
    assert elements == table + 1024 * 1024 + 8 * (12 * 1024**2 + 13 * 1024) + 2 * 1024
    _, halves = made_of(plan_of(Pipeline(2)))
    assert [chunk.owned.root.reduce_bytes for chunk in halves] == [0, 0]
    both = sum(state.reduce_bytes for chunk in halves for state in chunk.owned.states) / 4
    assert both == elements + table


@pytest.mark.parametrize("pipeline", [Pipeline(2), Pipeline(4), Pipeline(2, 2), Pipeline(4, 1, "gpipe")])
def test_stages_end_as_the_schedule_says(pipeline: Pipeline) -> None:
    """ZeRO-0, so that all micro-batches are alike: the schedule's clock, then reductions, tied gradients and the optimizer."""
    plan = plan_of(pipeline, zero=0)
    _, made = made_of(plan)
    seconds = []
    for chunk in made:
        last = chunk.passes.last_backward
        assert chunk.passes.first_forward.seconds == pytest.approx(chunk.passes.forward.seconds)
        seconds.append(
            ChunkSeconds(chunk.passes.forward.seconds, chunk.passes.backward.seconds, None, last.seconds - last.tail_seconds)
        )
    clock = run_schedule(pipeline, 8, seconds, [chunk.send_seconds for chunk in made[:-1]])
    found = found_of(plan)
    size = plan.mesh.size
    apart = links_of_axis(replace(CLUSTER, size=2 * size), Mesh((Axis("pp", 2), Axis("rest", size))), 0)
    tie = collective_seconds("all_reduce", 4 * 50304 * 1024, apart)
    for number, (stage, ended) in enumerate(zip(found.stages, clock, strict=True)):
        assert stage.busy_seconds == pytest.approx(ended.busy_seconds)
        assert stage.end_seconds == pytest.approx(ended.end_seconds + stage.tail_seconds + stage.optimizer_seconds)
        assert stage.busy_seconds + stage.bubble_seconds == pytest.approx(ended.end_seconds)
        reduced = [made[c].passes.last_backward.tail_seconds for c in range(number, len(made), pipeline.stages)]
        # the gradients of the table, which the embedding and the head share, are summed over both stages
        tied = tie if number in (0, pipeline.stages - 1) else 0.0
        assert min(reduced) + tied - 1e-12 <= stage.tail_seconds <= sum(reduced) + tied + 1e-12
        assert pipeline.virtual > 1 or stage.tail_seconds == pytest.approx(sum(reduced) + tied)
    assert found.step_seconds == max(stage.end_seconds for stage in found.stages)


def test_every_chunk_but_the_last_sends() -> None:
    _, made = made_of(plan_of(Pipeline(4)))
    sends = [chunk.send_seconds for chunk in made]
    assert sends[-1] == 0 < min(sends[:-1])


def test_stages_hold_the_micro_batches_in_flight() -> None:
    """1F1B on 4 equal stages: 4, 3, 2 and 1 micro-batches; GPipe: all 8 on each."""
    held = [dict(stage.table)["activations"] for stage in found_of(plan_of(Pipeline(4))).stage_memory]
    layer = (held[1] - held[2]) / 2  # two layers a stage
    assert held[1] / held[2] == pytest.approx(3 / 2, rel=0.02) and layer > 0
    assert held[0] > held[1] > held[2]
    gpipe = [dict(stage.table)["activations"] for stage in found_of(plan_of(Pipeline(4, 1, "gpipe"))).stage_memory]
    assert gpipe[1] == pytest.approx(gpipe[2]) and gpipe[1] / held[1] == pytest.approx(8 / 3, rel=0.02)


def test_the_fullest_stage_is_the_plans_memory_and_names_its_operation() -> None:
    found = found_of(plan_of(Pipeline(4)))
    assert found.peak_memory_bytes == max(stage.peak_bytes for stage in found.stage_memory) == sum(dict(found.memory).values())
    for number, stage in enumerate(found.stage_memory):
        assert stage.call in found.stages[number].calls
        assert stage.prefix in stage.place and (not stage.node or stage.node in stage.place)
    alone = evaluate(
        graph_of(), replace(plan_of(Pipeline(), many=1), mesh=candidate(graph_of(), 0, None, BF16, dp=32).mesh), CLUSTER
    )
    (one,) = alone.stage_memory
    assert one.phase in ("forward", "backward") and one.place.startswith(f"{one.phase} of ")


def test_several_groups_as_one() -> None:
    first = StateMemory(1, 2, 3, 4, False, 5, 6, 7, True, 8, 9, largest_tensor=10)
    second = StateMemory(10, 20, 30, 40, False, 50, 60, 70, True, 80, 90, largest_tensor=5)
    assert StateMemory.merged([first, second]) == StateMemory(11, 22, 33, 44, False, 55, 66, 77, True, 88, 99, largest_tensor=10)
    assert StateMemory.merged([first]) == first
    assert CallMemory(1, 2, 3, 4, first).latest_saved_bytes is None
