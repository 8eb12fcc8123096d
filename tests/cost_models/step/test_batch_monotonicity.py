"""What the search prunes by: a batch at once is never slower than in micro-batches; and the parts of a cost add up, on drawn
plans."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.handwritten_blocks import gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_replays
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.state_cost import StateCommunication
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.micro_batch_clock import CallSegments, simulate_step
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate

MESHES = ({"dp": 16}, {"dp": 2, "tp": 8}, {"dp": 4, "tp": 4}, {"dp": 1, "tp": 16})
OVERLAPS = (Overlap(), Overlap(0.1), Overlap(0.2, gradient_reduction=False), Overlap(parameter_gather=False))


@lru_cache
def graph_of(hidden: int, seq: int) -> Graph:
    return gpt2_graph(layers=2, hidden=hidden, heads=8, vocabulary=1024, seq=seq, batch=16, dtype="bfloat16")


@lru_cache
def drawn(mesh: int, seed: int, hidden: int = 256, seq: int = 128) -> Candidate:
    graph = graph_of(hidden, seq)
    plan = drawn_candidate(graph, mesh_of(**MESHES[mesh]), seed, zero=seed % 4)
    return with_replays(graph, plan, seed, share=0.5 * (seed % 3), offload=0.0)


def priced(
    plan: Candidate, overlap: Overlap, batch: int, micro_batches: int = 1, hidden: int = 256, seq: int = 128
) -> Evaluation:
    cluster = replace(Cluster.parse("dgx-h100:2"), overlap=overlap)
    return evaluate(graph_of(hidden, seq), replace(plan, batch=batch, micro_batches=micro_batches), cluster)


@pytest.mark.parametrize("mesh", range(len(MESHES)))
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 2 else ()) for seed in range(8)])
@pytest.mark.parametrize("size", [(64, 32), (1024, 512)])
def test_at_once_is_never_slower_than_micro_batches(mesh: int, seed: int, size: tuple[int, int]) -> None:
    """Small operations, which launches bound, and large ones. Neither k steps nor k micro-batches of a step are faster."""
    plan, overlap = drawn(mesh, seed, *size), OVERLAPS[seed % len(OVERLAPS)]
    one = priced(plan, overlap, 16, 1, *size).step_seconds
    for times in (2, 3, 8):
        whole = priced(plan, overlap, 16 * times, 1, *size).step_seconds
        assert whole <= times * one * (1 + 1e-9)
        assert whole <= priced(plan, overlap, 16 * times, times, *size).step_seconds * (1 + 1e-9)
        assert whole >= one * (1 - 1e-9)


@pytest.mark.parametrize("mesh", range(len(MESHES)))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_parts_of_a_price_add_up(mesh: int, micro_batches: int) -> None:
    for seed in range(6):
        found = priced(drawn(mesh, seed), OVERLAPS[seed % len(OVERLAPS)], 16 * micro_batches, micro_batches)
        streams = found.compute_seconds + found.exposed_seconds + found.stall_seconds + found.bubble_seconds
        assert streams + found.optimizer_seconds == pytest.approx(found.step_seconds)
        assert min(found.compute_seconds, found.exposed_seconds, found.stall_seconds, found.optimizer_seconds) >= 0
        assert sum(dict(found.memory).values()) == found.peak_memory_bytes


amounts = st.integers(0, 12)
LINKS = frozenset({"nvlink"})


@st.composite
def halves(draw: st.DrawFn) -> tuple[list[CallSegments], list[CallSegments]]:
    """Some calls, and the same with a half of the batch or a little more than that."""
    whole, half = [], []
    for _ in range(draw(st.integers(1, 4))):
        gather, backward, reduce = draw(amounts), draw(amounts), draw(amounts)
        communication = StateCommunication(gather, backward and gather, backward, reduce, reduce, 0, 0)
        bodies: list[list[tuple[float, frozenset[str]]]] = [[], [], [], []]
        for pair in range(2):
            for _ in range(draw(st.integers(0, 3))):
                seconds, links = 2 * draw(amounts), draw(st.sampled_from([frozenset(), LINKS]))
                bodies[2 * pair].append((seconds, links))
                bodies[2 * pair + 1].append((seconds / 2 + draw(st.integers(0, 1)), links))
        whole.append(CallSegments(bodies[0], bodies[2], communication))
        half.append(CallSegments(bodies[1], bodies[3], communication))
    return whole, half


@given(halves(), st.sampled_from(OVERLAPS))
@settings(max_examples=150, deadline=None)
def test_the_clock_alone_keeps_the_property(calls: tuple[list[CallSegments], list[CallSegments]], overlap: Overlap) -> None:
    none = StateCommunication(0, 0, 0, 0, 0, 0, 0)
    whole = simulate_step(calls[0], none, LINKS, 1, overlap=overlap)
    parts = simulate_step(calls[1], none, LINKS, 2, overlap=overlap)
    assert whole.forward_seconds + whole.backward_seconds <= parts.forward_seconds + parts.backward_seconds + 1e-9
