"""The simulation against a brute-force clock that ticks, sums that must add up, and monotonicity."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blocks import gpt2_graph
from support.candidates import mesh_of
from support.hand_plans import GPT2_TENSOR_PARALLEL, candidate

from autopar.cost_models.evaluate import evaluate
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.simulate import simulate
from autopar.errors import ClusterError
from autopar.ir.plan import Precision

BF16 = Precision("bfloat16", "float32")
MINE, OTHER = frozenset({"nvlink"}), frozenset({"elsewhere"})


def ticking(calls: list[Any], root: tuple[int, int]) -> int:
    """The same rules, one tick at a time: work to do on the main stream, and a list of transfers in order."""
    clock, queue, done = 0, [], set()

    def tick(busy: frozenset[str]) -> None:
        nonlocal clock
        clock += 1
        if queue and not busy & MINE:
            queue[0][1] -= 1
        settle()

    def settle() -> None:
        while queue and queue[0][1] == 0:
            done.add(queue.pop(0)[0])

    def issue(name: str, ticks: int) -> None:
        queue.append([name, ticks])
        settle()

    def wait(name: str) -> None:
        while name not in done:
            tick(frozenset())

    def main(segments: Any) -> None:
        for ticks, links in segments:
            for _ in range(ticks):
                tick(links)

    issue("root", root[0])
    wait("root")
    issue("gather 0", calls[0].gather)
    for index, call in enumerate(calls):
        wait(f"gather {index}")
        if index + 1 < len(calls):
            issue(f"gather {index + 1}", calls[index + 1].gather)
        main(call.forward)
    for index in reversed(range(len(calls))):
        if index + 1 < len(calls):
            wait(f"again {index}")
        if index:
            issue(f"again {index - 1}", calls[index - 1].again)
        main(calls[index].backward)
        if index + 1 < len(calls):
            wait(f"reduce {index + 1}")
        issue(f"reduce {index}", calls[index].reduce)
    issue("tail", root[1])
    wait("tail")
    return clock


segments = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([frozenset(), MINE, OTHER])), max_size=4)
ticks = st.integers(0, 12)
some_calls = st.lists(
    st.builds(
        lambda f, b, g, a, r: SimpleNamespace(forward=f, backward=b, gather=g, again=a, reduce=r),
        segments,
        segments,
        ticks,
        ticks,
        ticks,
    ),
    min_size=1,
    max_size=5,
)


@given(some_calls, st.tuples(ticks, ticks))
@settings(max_examples=200, deadline=None)
def test_simulation_is_the_ticking_clock(calls: list[Any], root: tuple[int, int]) -> None:
    steps = simulated(calls, root)
    assert steps.forward_seconds + steps.backward_seconds == ticking(calls, root)


def simulated(calls: list[Any], root: tuple[int, int]) -> Any:
    def state(gather: int, again: int, reduce: int) -> Any:
        return SimpleNamespace(
            gather_forward_seconds=gather, gather_backward_seconds=again, reduce_seconds=reduce, optimizer_seconds=0
        )

    graph = SimpleNamespace(calls=[SimpleNamespace(block=str(index)) for index in range(len(calls))])
    plan = SimpleNamespace(mesh=mesh_of(dp=8))
    runs = {str(index): call for index, call in enumerate(calls)}
    states = [state(call.gather, call.again, call.reduce) for call in calls]
    return simulate(graph, plan, Cluster.parse("dgx-h100:1"), runs, states, state(root[0], 0, root[1]))  # type: ignore[arg-type]


def test_gathers_hide_behind_computing_by_hand() -> None:
    """Two calls, 10 ticks each way, of which 4 occupy the link. Gathers of 8 stall 2 each; of the reductions the last is seen."""
    body = [(6, frozenset()), (4, MINE)]
    call = SimpleNamespace(forward=body, backward=body, gather=8, again=8, reduce=5)
    steps = simulated([call, call], (0, 0))
    assert steps.forward_seconds == 8 + (10 + 2) + 10
    assert steps.backward_seconds == (10 + 2) + 10 + 5


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
    assert found.step_seconds == pytest.approx(found.forward_seconds + found.backward_seconds + found.optimizer_seconds)
    streams = found.compute_seconds + found.exposed_seconds + found.waited_seconds
    assert streams == pytest.approx(found.forward_seconds + found.backward_seconds)
    assert sum(block.calls for block in found.blocks) == len(found.calls) == 6
    assert sum(call.forward_waited_seconds for call in found.calls) <= found.waited_seconds
    for before, after in zip(found.calls, found.calls[1:], strict=False):
        assert after.forward_start_seconds == pytest.approx(before.forward_start_seconds + before.forward_seconds)
        assert before.backward_start_seconds == pytest.approx(after.backward_start_seconds + after.backward_seconds)
    assert 0 < found.mfu < 1 and found.mfu == pytest.approx(found.tflops_per_device * 1e12 / 989e12)
    assert dict(found.redundant_share).get("tp", 0.0) <= 0.02


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
    assert tied.waited_seconds >= alone


def test_thirty_two_layers_in_fifty_milliseconds() -> None:
    graph = gpt2_graph(layers=32, dtype="bfloat16", batch=64, hidden=1024, heads=16)
    plan = candidate(graph, 3, GPT2_TENSOR_PARALLEL, BF16, dp=2, tp=4)
    cluster = Cluster.parse("dgx-h100:1")
    evaluate(graph, plan, cluster)
    start = time.process_time()
    evaluate(graph, plan, cluster)
    assert time.process_time() - start < 0.05
