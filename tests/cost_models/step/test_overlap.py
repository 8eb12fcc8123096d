"""Communication that overlaps with the main stream, by hand; and that more overlap is never slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.events.state_transfers import step_transfers, transfer_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_parser import parse_overlap
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.state_cost import StateCommunication
from autopar.cost_models.step.micro_batch_clock import CallSegments, StepPasses, simulate_step
from autopar.errors import ClusterError

MINE = frozenset({"nvlink"})
NOTHING = StateCommunication(0, 0, 0, 0, 0, 0, 0)
amounts = st.integers(0, 12)


def step(overlap: Overlap, many: int = 1) -> StepPasses:
    """Three calls of 10 ticks each way, gathers of 4 and reductions of 6."""
    part = CallSegments([(10, frozenset())], [(10, frozenset())], StateCommunication(4, 4, 4, 6, 6, 0, 0))
    return simulate_step([part] * 3, NOTHING, MINE, many, overlap=overlap)


def seconds(steps: StepPasses) -> float:
    return steps.forward_seconds + steps.backward_seconds


def test_full_overlap_by_hand() -> None:
    """The first gather and the last reduction are exposed; with a call of the backward overlap a reduction of 6 and a gather of
    4."""
    assert seconds(step(Overlap())) == 4 + 30 + 30 + 6


def test_exposed_gathers_and_reductions_by_hand() -> None:
    """Three gathers forward, two backward (the last call keeps its weights), or three reductions at the end."""
    assert seconds(step(Overlap(parameter_gather=False))) == 3 * 4 + 30 + 2 * 4 + 30 + 6
    assert seconds(step(Overlap(gradient_reduction=False))) == 4 + 30 + 30 + 3 * 6
    assert seconds(step(Overlap(parameter_gather=False, gradient_reduction=False))) == 3 * 4 + 30 + 2 * 4 + 30 + 3 * 6


def test_contention_by_hand() -> None:
    """Transfers take a fifth of the speed while they run: 2 x 4 in the forward; in the backward 4, 6 + 4 and 6, and the last."""
    assert seconds(step(Overlap(contention=0.2))) == pytest.approx(4 + 30 + 0.2 * 8 + 30 + 0.2 * 20 + 6)


communications = st.builds(StateCommunication, amounts, amounts, amounts, amounts, amounts, st.just(0), st.just(0))
bodies = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([frozenset(), MINE])), max_size=3)
parts = st.lists(st.builds(CallSegments, bodies, bodies, communications), min_size=1, max_size=4)


@given(parts, communications, st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.4]), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bounds(
    calls: list[CallSegments], root: StateCommunication, many: int, contention: float, reductions: bool, gathers: bool
) -> None:
    """No less than the main stream alone, no more than one thing after the other; freedom from contention never hurts."""
    found = seconds(simulate_step(calls, root, MINE, many, overlap=Overlap(contention, reductions, gathers)))
    alone = many * sum(ticks for part in calls for ticks, _ in (*part.forward, *part.backward))
    passes = list(step_transfers(Overlap()).counted(many))
    sent = sum(transfer_seconds(passes, each).sent for each in (root, *(part.communication for part in calls)))
    assert alone <= found + 1e-9 and found <= alone + sent + 1e-9
    assert seconds(simulate_step(calls, root, MINE, many, overlap=Overlap(0.0, reductions, gathers))) <= found + 1e-9
    assert seconds(simulate_step(calls, root, MINE, many, overlap=Overlap(0.0, True, gathers))) <= found + 1e-9


def test_description() -> None:
    found = parse_overlap({"contention": 0.1, "parameter_gather": False, "blocking_sends": True}, "overlap")
    assert found == Overlap(0.1, parameter_gather=False, blocking_sends=True)
    assert parse_overlap({}, "overlap") == Overlap()
    with pytest.raises(ClusterError, match="share below 1"):
        parse_overlap({"contention": 1.5}, "overlap")
    cluster = replace(Cluster.parse("dgx-h100:1"), overlap=found)
    assert Cluster.from_dict(cluster.to_dict()).overlap == found
