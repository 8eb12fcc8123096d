"""The simulation against a brute-force clock that ticks, sums that must add up, and monotonicity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness.processor_seconds import processor_seconds
from support.models.handwritten_blocks import gpt2_graph
from support.plans.handwritten_candidates import GPT2_TENSOR_PARALLEL, candidate

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.state_cost import StateCommunication
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.micro_batch_clock import CallSegments, simulate_step
from autopar.cost_models.step.stage_devices import cut_bytes, stage_cluster, stage_link
from autopar.cost_models.step.streams import Streams
from autopar.errors import ClusterError
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.plan import Candidate, Pipeline, Precision

BF16 = Precision("bfloat16", "float32")
MINE, OTHER = frozenset({"nvlink"}), frozenset({"elsewhere"})


def ticking(calls: list[CallSegments], root: StateCommunication, many: int) -> tuple[float, float]:
    """The same rules, one tick at a time, every micro-batch by itself: work to do on the main stream, a list of transfers in
    order, and one transfer that runs when there is no other. Ends of the last forward and of everything."""
    clock, queue, done, idle = 0, [], set(), 0

    def tick(busy: frozenset[str]) -> None:
        nonlocal clock, idle
        clock += 1
        if not busy & MINE:
            if queue:
                queue[0][1] -= 1
            else:
                idle = max(0, idle - 1)
        settle()

    def settle() -> None:
        while queue and queue[0][1] == 0:
            done.add(queue.pop(0)[0])

    def issue(name: str, ticks: float) -> None:
        queue.append([name, int(ticks)])
        settle()

    def wait(name: str) -> None:
        while name not in done:
            tick(frozenset())

    def main(segments: Any) -> None:
        for ticks, links in segments:
            for _ in range(int(ticks)):
                tick(links)

    half = 0
    for micro in range(many):
        first, last = micro == 0, micro == many - 1
        if first:
            issue("root", root.gather_first)
            wait("root")
            issue("0 gather 0", calls[0].communication.gather_first)
        else:
            done.add(f"{micro} gather 0")
        for index, call in enumerate(calls):
            wait(f"{micro} gather {index}")
            if index + 1 < len(calls):
                after = calls[index + 1].communication
                issue(f"{micro} gather {index + 1}", after.gather_first if first else after.gather_each)
            main(call.forward)
        while idle:
            tick(frozenset())
        half = clock
        for index in reversed(range(len(calls))):
            if index + 1 < len(calls):
                wait(f"{micro} backward gather {index}")
            if index:
                issue(f"{micro} backward gather {index - 1}", calls[index - 1].communication.gather_backward)
            main(calls[index].backward)
            main([(calls[index].communication.accumulate_seconds, frozenset())])
            if index + 1 < len(calls):
                wait(f"{micro} reduce {index + 1}")
            communication = calls[index].communication
            if last:
                issue(f"{micro} reduce {index}", communication.reduce_last)
            elif index:
                issue(f"{micro} reduce {index}", communication.reduce_each)
            else:
                idle += int(communication.reduce_each + root.reduce_each)
    issue("tail", root.reduce_last)
    wait("tail")
    return half, clock


segments = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([frozenset(), MINE, OTHER])), max_size=4)
ticks = st.integers(0, 12)
communications = st.builds(StateCommunication, ticks, ticks, ticks, ticks, ticks, ticks, st.just(0))
some_calls = st.lists(st.builds(CallSegments, segments, segments, communications), min_size=1, max_size=5)


@given(some_calls, ticks, ticks, ticks, st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_simulation_is_the_ticking_clock(calls: list[CallSegments], gather: int, each: int, last: int, many: int) -> None:
    """Multiplied from two micro-batches, and all of them walked through."""
    root = StateCommunication(gather, 0, 0, each, last, 0, 0)
    steps = simulate_step(calls, root, MINE, many)
    assert steps.forward_seconds + steps.backward_seconds == ticking(calls, root, many)[1]


def by_hand(gather: int = 0, backward: int = 0, reduce: int = 0) -> CallSegments:
    body = [(6, frozenset()), (4, MINE)]
    return CallSegments(body, body, StateCommunication(gather, backward, backward, reduce, reduce, 0, 0))


def test_gathers_overlap_with_compute_by_hand() -> None:
    """Two calls, 10 ticks each way, of which 4 occupy the link. Gathers of 8 stall 2 each; of the reductions the last is seen."""
    steps = simulate_step([by_hand(8, 8, 5)] * 2, by_hand().communication, MINE)
    assert steps.forward_seconds == 8 + (10 + 2) + 10
    assert steps.backward_seconds == (10 + 2) + 10 + 5


def test_micro_batches_by_hand() -> None:
    """The first gather is seen once, since the first call keeps its weights from a backward to the next forward; the last
    reduction of a micro-batch overlaps with the forward that follows, in what the gathers and the main stream leave free."""
    steps = simulate_step([by_hand(8, 8, 5)] * 2, by_hand().communication, MINE, 3)
    assert steps.first_forward.seconds == 8 + 12 + 10 and steps.last_backward.seconds == 12 + 10 + 5
    assert steps.forward.seconds == 12 + 10 and steps.backward.seconds == 12 + 10
    assert steps.forward_seconds == 30 + 2 * 22 and steps.backward_seconds == 27 + 2 * 22


@given(segments, ticks, st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=100, deadline=None)
def test_a_call_is_its_formula(body: Any, transfer_seconds: int, contention: float) -> None:
    """However computing and collectives follow each other, while one transfer overlaps with them."""
    streams = Streams(MINE, contention)
    transfer = streams.issue(transfer_seconds)
    for seconds, links in body:
        streams.run(seconds, links)
    streams.wait(transfer)
    main = sum(seconds for seconds, _ in body)
    shared = sum(seconds for seconds, links in body if links == MINE)
    assert streams.clock_seconds == pytest.approx(max(main + contention * transfer_seconds, transfer_seconds + shared))


@given(some_calls, ticks, st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_step_is_its_formula(calls: list[CallSegments], last: int, many: int) -> None:
    steps = simulate_step(calls, StateCommunication(0, 0, 0, 0, last, 0, 0), MINE, many)
    between = (many - 1) * (steps.backward.seconds + steps.forward.seconds)
    expected = steps.first_forward.seconds + between + steps.last_backward.seconds
    assert steps.forward_seconds + steps.backward_seconds == pytest.approx(expected)


def priced(
    zero: int = 0, tensor: bool = False, cluster: str = "dgx-h100:1", batch: int = 64, layers: int = 4, **axes: int
) -> Any:
    graph = gpt2_graph(layers=layers, dtype="bfloat16", batch=batch, hidden=1024, heads=16)
    plan = candidate(graph, zero, GPT2_TENSOR_PARALLEL if tensor else None, BF16, **axes)
    return evaluate(graph, plan, Cluster.parse(cluster))


@pytest.mark.parametrize(
    ("zero", "tensor", "axes"),
    [(0, False, {"dp": 8}), (3, False, {"dp": 8}), (0, True, {"dp": 1, "tp": 8}), (3, True, {"dp": 2, "tp": 4})],
)
def test_the_parts_add_up(zero: int, tensor: bool, axes: dict[str, int]) -> None:
    found = priced(zero, tensor, **axes)
    streams = found.compute_seconds + found.exposed_seconds + found.stall_seconds
    assert found.step_seconds == pytest.approx(streams + found.optimizer_seconds) and found.bubble_seconds == 0
    assert 0 < found.mfu < 1 and found.mfu == pytest.approx(found.tflops_per_device * 1e12 / 989e12)
    assert dict(found.redundant_share).get("tp", 0.0) <= 0.02


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_micro_batches(zero: int) -> None:
    """Four micro-batches of 16 a rank: no less than one of 16 (all else once), no more than four steps of one."""
    graph = gpt2_graph(layers=4, dtype="bfloat16", batch=128, hidden=1024, heads=16)
    cluster = Cluster.parse("dgx-h100:1")
    one = evaluate(graph, replace(candidate(graph, zero, None, BF16, dp=8), batch=128), cluster)
    whole = replace(candidate(graph, zero, None, BF16, dp=8), batch=512, micro_batches=4)
    four = evaluate(graph, whole, cluster)
    assert four.model_flops == pytest.approx(4 * one.model_flops)
    assert four.compute_seconds > 4 * one.compute_seconds  # gradients are added up
    assert four.step_seconds < 4 * one.step_seconds
    moved = {z: dict(evaluate(graph, _with_zero(whole, z), cluster).axis_seconds)["dp"] for z in range(4)}
    assert moved[zero] > dict(one.axis_seconds)["dp"] * (1.0, 1.0, 1.8, 3.0)[zero]  # 1, 1, 10 / 4 and 4 times what one moves
    assert (
        moved[0]
        < 1.5 * dict(evaluate(graph, _with_zero(replace(whole, batch=128, micro_batches=1), 0), cluster).axis_seconds)["dp"]
    )
    assert moved[1] < moved[2] < moved[3]
    parts = four.compute_seconds + four.exposed_seconds + four.stall_seconds + four.optimizer_seconds
    assert parts == pytest.approx(four.step_seconds)


def _with_zero(plan: Candidate, zero: int) -> Candidate:
    return replace(plan, blocks=tuple(replace(block, zero=zero) for block in plan.blocks))


@pytest.mark.parametrize("pipeline", [Pipeline(2), Pipeline(4), Pipeline(2, 2), Pipeline(2, 1, "gpipe")])
@pytest.mark.parametrize("zero", [1, 3])
def test_pipelines(pipeline: Pipeline, zero: int) -> None:
    """The parts add up, the bubble is at least the schedule's, and every call is on one stage."""
    graph = gpt2_graph(layers=8, dtype="bfloat16", batch=128, hidden=1024, heads=16)
    cluster = Cluster.parse("dgx-h100:4")
    plan = candidate(graph, zero, None, BF16, dp=32 // pipeline.stages)
    plan = replace(plan, batch=128 * 8, micro_batches=8, pipeline=pipeline)
    found = evaluate(graph, plan, cluster)
    parts = found.compute_seconds + found.exposed_seconds + found.stall_seconds + found.bubble_seconds
    assert parts + found.optimizer_seconds == pytest.approx(found.step_seconds)
    assert sorted(index for stage in found.stages for index in stage.calls) == list(range(len(graph.calls)))
    slowest = max(found.stages, key=lambda stage: stage.end_seconds)
    assert slowest.end_seconds == found.step_seconds and len(found.stages) == pipeline.stages
    least = min(stage.busy_seconds for stage in found.stages) * (pipeline.stages - 1) / (8 * pipeline.virtual)
    assert slowest.bubble_seconds >= 0.9 * least
    assert found.model_flops == pytest.approx(evaluate(graph, replace(plan, pipeline=Pipeline(), mesh=candidate(
        graph, zero, None, BF16, dp=32).mesh), cluster).model_flops)  # fmt: skip


def test_what_stages_send_takes_the_links_of_the_data_axis() -> None:
    """One part that computes 10, gathers 8 for each pass, and talks to another stage on the same link: 6 a pass overlap with
    compute; of 12, the backward leaves 2 to the forward, which then has 4 too many."""
    part = CallSegments([(10, frozenset())], [(10, frozenset())], StateCommunication(8, 8, 8, 0, 0, 0, 0))
    root = by_hand().communication
    assert simulate_step([part], root, MINE, 2, pipelined=True).forward.seconds == 8 + 10
    assert simulate_step([part], root, MINE, 2, pipelined=True, sent_seconds=6).forward.seconds == 8 + 10
    assert simulate_step([part], root, MINE, 2, pipelined=True, sent_seconds=12).forward.seconds == 8 + 10 + 4


def test_stages_talk_over_the_level_that_joins_them() -> None:
    """Stages of 4 devices in nodes of 8: every other cut is inside a node; what crosses is the hidden state alone."""
    graph = gpt2_graph(layers=8, dtype="bfloat16", batch=64, hidden=1024, heads=16)
    plan = replace(candidate(graph, 1, None, BF16, dp=4), micro_batches=4, pipeline=Pipeline(4))
    cluster = Cluster.parse("dgx-h100:2")
    names = [link.name for link in cluster.links]
    found = [stage_link(cluster, plan.mesh.size, stage, (stage + 1) % 4) for stage in range(4)]
    assert [link.levels[0].link.name for link in found] == [names[0], names[-1], names[0], names[-1]]
    runs = {
        b.name: CallTrace.of(BlockCosts(b, plan.mesh, 16, stage_cluster(cluster, 4)), plan.block(b.name)) for b in graph.blocks
    }
    second = chunk_calls(graph, plan.pipeline)[1]
    sequence = graph.inputs[0].shape[1]
    assert cut_bytes(graph, runs, second[0]) == 16 / 4 * sequence * 1024 * 2  # type: ignore[operator]


def test_model_flops_do_not_depend_on_the_plan() -> None:
    assert priced(dp=8).model_flops == priced(3, True, dp=2, tp=4).model_flops


def test_redundant_computing_is_told() -> None:
    assert dict(priced(0, False, dp=1, tp=8).redundant_share) == {"dp": 0.0, "tp": 1.0}


def test_more_nodes_and_larger_batches() -> None:
    assert priced(3, cluster="dgx-h100:4", dp=32, batch=64).step_seconds < priced(3, dp=8, batch=64).step_seconds
    assert priced(dp=8, batch=128).step_seconds > priced(dp=8, batch=64).step_seconds


def test_mesh_must_fit() -> None:
    with pytest.raises(ClusterError, match="4 ranks"):
        priced(dp=4)


def test_tied_embedding_is_gathered_first_and_reduced_last() -> None:
    """Its bytes cross the data axis once each way, though two blocks use it."""
    tied, axis = priced(1, dp=8), 7 / 8 / 360e9
    table = 50304 * 1024
    alone = (table * 2 + table * 4) * axis
    assert dict(tied.axis_seconds)["dp"] > alone
    assert tied.stall_seconds >= alone


def test_thirty_two_layers_in_fifty_milliseconds() -> None:
    graph = gpt2_graph(layers=32, dtype="bfloat16", batch=64, hidden=1024, heads=16)
    plan = candidate(graph, 3, GPT2_TENSOR_PARALLEL, BF16, dp=2, tp=4)
    cluster = Cluster.parse("dgx-h100:1")
    evaluate(graph, plan, cluster)
    assert processor_seconds(lambda: evaluate(graph, plan, cluster), 3) < 0.05


def test_a_layer_takes_the_larger_of_host_and_device() -> None:
    """Forward and backward by themselves: launches of 1 us hide behind the device, launches of 1 ms are all that counts."""
    graph, cluster = gpt2_graph(layers=2, hidden=256, heads=4, vocabulary=512, seq=64, batch=8), Cluster.parse("dgx-h100:1")
    plan = candidate(graph, 0, None, BF16, dp=8)
    alone = evaluate(graph, plan, cluster)

    def with_launches(seconds: float) -> Cluster:
        return replace(cluster, device=replace(cluster.device, host_launch_seconds=seconds))

    assert evaluate(graph, plan, with_launches(1e-6)).step_seconds == alone.step_seconds
    slow = evaluate(graph, plan, with_launches(1e-3))
    launches = 0
    for block in graph.blocks:
        costs = BlockCosts(block, plan.mesh, plan.micro_batch, cluster)
        launches += graph.count(block.name) * sum(sum(costs.profile(node.name).launches) for node in block.nodes)
    collectives = sum(graph.count(each.block) * 2 * len(each.conversions) for each in plan.blocks)
    total = (slow.compute_seconds + slow.exposed_seconds) / (1e-3 * plan.micro_batches)
    assert launches <= total * (1 + 1e-9) and total <= launches + collectives + 1e-6
    assert slow.launch_stall_seconds > 0.9 * slow.exposed_seconds
    assert slow.step_seconds > launches * 1e-3
