"""State sharding per block, memory and recomputation against exhaustion: every combination priced by the evaluator alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import llama_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate, Precision
from autopar.rules.registry import default_registry
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.memory_events import add_memory_constraint
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.problem.problem import build_problem
from autopar.solve.search import search
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.meshes import mesh_of
from autopar.solve.space.options import SearchOptions

BF16 = Precision("bfloat16", "float32")


def with_memory(cluster: Cluster, size: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(size)))


def every_zero(graph: Graph, candidate: Candidate, cluster: Cluster) -> Iterator[Evaluation]:
    for zeros in product(range(4), repeat=len(candidate.blocks)):
        blocks = tuple(replace(plan, zero=zero) for plan, zero in zip(candidate.blocks, zeros, strict=True))
        yield evaluate(graph, replace(candidate, blocks=blocks), cluster)


@pytest.mark.parametrize("name", ["dgx-h100:1", "dgx-a100:2", "local:4"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_zero_per_block_is_the_best_of_all(name: str, share: float) -> None:
    graph = gpt2_graph(layers=6, batch=16, hidden=512, heads=8)
    roomy = replace(Cluster.parse(name), host=None)  # what waits on the host is not sharded
    roomy = with_memory(roomy, 200 * 2**30)
    start = search(graph, roomy, SearchOptions(force={"dp": roomy.size, "zero": 0}, relative_gap=1e-9)).candidate
    every = list(every_zero(graph, start, roomy))
    low, high = min(e.peak_memory_bytes for e in every), max(e.peak_memory_bytes for e in every)
    capacity = low + (high - low) * share
    expected = min(e.step_seconds for e in every if e.peak_memory_bytes <= capacity)
    tight = with_memory(roomy, capacity + 1)
    result = search(graph, tight, SearchOptions(force={"dp": roomy.size}, relative_gap=1e-9))
    assert result.warnings == ()
    assert result.evaluation.fits
    recomputed = any(plan.recompute or plan.recompute_nodes or plan.recompute_conversions for plan in result.candidate.blocks)
    least = 0.0 if recomputed else expected * (1 - 2e-4)  # what `every` cannot do may be faster still
    assert least <= result.evaluation.step_seconds <= expected * (1 + 2e-4)


def test_parts_of_blocks_are_recomputed_where_nothing_else_fits() -> None:
    """Two sequences per device, and no host to offload to."""
    graph = llama_graph(layers=32, batch=128)
    cluster = replace(Cluster.parse("dgx-h100:8"), host=None)
    result = search(graph, cluster, SearchOptions(precision=BF16, force={"dp": 64, "micro": 2, "zero_group": 0}))
    assert result.evaluation.fits and result.warnings == ()
    plan = result.candidate.block("LlamaDecoderLayer")
    assert plan.recompute_nodes and not plan.offload and not plan.recompute
    assert len(plan.recompute_nodes) < len(plan.nodes) / 2
    assert [each.status for each in result.solutions] == [Status.OPTIMAL]
    # the bound is below plans too that recompute more in some layers than in others
    assert 0.99 * result.evaluation.step_seconds <= result.lower_bound_seconds < result.evaluation.step_seconds


def test_the_relaxation_under_memory_is_below_the_plan() -> None:
    """It needs no solver of integers; and it knows what cannot fit at all."""
    graph, cluster = llama_graph(layers=3), Cluster.parse("dgx-h100:1")
    problem = build_problem(graph, mesh_of(2, 4), cluster, BF16, "adamw", default_registry())
    free = MeshSolver(graph, problem, (), 1e-4, MeshSolution(GridPoint(problem.mesh)))
    free.solve_without_memory(30)
    assert free.result.plan is not None
    tight = replace(problem, cluster=with_memory(cluster, free.result.plan.evaluation.peak_memory_bytes * 0.8))
    bound = MeshSolver(graph, tight, (), 1e-4, MeshSolution(GridPoint(problem.mesh))).relax_with_memory(30)
    solved = MeshSolver(graph, tight, (), 1e-4, MeshSolution(GridPoint(problem.mesh)))
    solved.solve_with_memory(30)
    assert solved.result.plan is not None and solved.result.solved
    assert 0.9 * solved.result.plan.evaluation.step_seconds <= bound <= solved.result.plan.evaluation.step_seconds * (1 + 1e-6)
    too_small = replace(problem, cluster=with_memory(cluster, cluster.device.base_bytes * 1.01))
    assert MeshSolver(graph, too_small, (), 1e-4, MeshSolution(GridPoint(problem.mesh))).shortage_bytes() > 0


def test_a_limit_just_below_the_fastest_plan_is_met() -> None:
    graph = llama_graph(layers=4, batch=8)
    cluster = Cluster.parse("dgx-h100:1")
    free = search(graph, cluster, SearchOptions(precision=BF16, force={"dp": 2, "tp": 4}))
    tight = with_memory(cluster, free.evaluation.peak_memory_bytes * 0.97)
    result = search(graph, tight, SearchOptions(precision=BF16, force={"dp": 2, "tp": 4}))
    assert result.evaluation.fits and result.warnings == ()
    assert result.evaluation.step_seconds >= free.evaluation.step_seconds


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_no_cost_is_noise(optimizer: str) -> None:
    """HiGHS took minutes for a relaxation, in circles, where what an update costs beside its elements was 1e-17 of a step."""
    mesh, cluster = mesh_of(2, 4), Cluster.parse("dgx-h100:1")
    problem = build_problem(llama_graph(), mesh, cluster, BF16, optimizer, default_registry())
    form = formulate(problem, recompute=True)
    add_memory_constraint(form)
    assert all(not cost or abs(cost) > 1e-9 for cost in form.model.cost)
