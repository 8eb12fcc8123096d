"""The ILP of several micro-batches against the evaluator: equal, whatever the state sharding and the links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import drawn_graph
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Precision
from autopar.ir.verify import verify_candidate
from autopar.rules.registry import default_registry
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.problem.problem import build_problem

BF16 = Precision("bfloat16", "float32")


def ratio(graph: Graph, mesh: Mesh, cluster: Cluster, many: int, zeros: tuple[int, ...]) -> float:
    problem = build_problem(graph, mesh, cluster, BF16, "adamw", default_registry(), zeros, micro_batches=many)
    form = formulate(problem)
    outcome = ilp.solve(form.model, relative_gap=1e-7)
    candidate = decode(form, outcome.values)
    verify_candidate(graph, candidate, cluster.size)
    assert (candidate.micro_batches, candidate.micro_batch) == (many, graph.batch)
    found = evaluate(graph, candidate, cluster, costs=problem.batch_costs)
    assert found.step_seconds == pytest.approx(evaluate(graph, candidate, cluster).step_seconds)
    return found.step_seconds / (outcome.objective * form.second_unit)


@pytest.mark.parametrize("zeros", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("many", [1, 2, 7])
def test_evaluator_and_ilp_agree(many: int, zeros: tuple[int, ...]) -> None:
    """Tied embeddings, and nodes joined by a slow link, which the data axis shares with the tensor axis of 16."""
    graph = gpt2_graph(layers=3, dtype="bfloat16", batch=32, hidden=1024, heads=16)
    for cluster, mesh in [
        ("dgx-h100:1", mesh_of(dp=2, tp=4)),
        ("dgx-h100:4", mesh_of(dp=32, tp=1)),
        ("dgx-h100:4", mesh_of(dp=2, tp=16)),
    ]:
        found = ratio(graph, mesh, Cluster.parse(cluster), many, zeros)
        assert 1 - 1e-6 <= found <= 1 + 1e-6


@pytest.mark.parametrize(
    "overlap", [Overlap(0.1), Overlap(0.1, False, True), Overlap(0.1, True, False), Overlap(0.3, False, False)]
)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_they_agree_on_what_overlaps(overlap: Overlap, zero: int) -> None:
    graph = gpt2_graph(layers=3, dtype="bfloat16", batch=32, hidden=1024, heads=16)
    cluster = replace(Cluster.parse("dgx-h100:4"), overlap=overlap)
    for many in (1, 3):
        for mesh in (mesh_of(dp=32, tp=1), mesh_of(dp=2, tp=16)):
            assert ratio(graph, mesh, cluster, many, (zero,)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_on_drawn_graphs(seed: int) -> None:
    graph = replace(drawn_graph(seed, calls=3), batch=8)
    for mesh in (mesh_of(dp=8, tp=1), mesh_of(dp=4, tp=2)):
        assert 1 - 1e-6 <= ratio(graph, mesh, Cluster.parse("dgx-h100:1"), 4, (0, 1, 2, 3)) <= 1 + 1e-6


def test_many_micro_batches_make_zero_3_dear() -> None:
    """One micro-batch between slow nodes: cutting gradients costs nothing. Of sixteen, ZeRO-3 gathers all weights for each."""
    graph = gpt2_graph(layers=3, dtype="bfloat16", batch=32, hidden=1024, heads=16)
    cluster, mesh = Cluster.parse("dgx-h100:4"), mesh_of(dp=32, tp=1)

    def seconds(zeros: tuple[int, ...], many: int) -> float:
        problem = build_problem(graph, mesh, cluster, BF16, "adamw", default_registry(), zeros, micro_batches=many)
        form = formulate(problem)
        return ilp.solve(form.model, relative_gap=1e-7).objective * form.second_unit

    assert seconds((2,), 1) == pytest.approx(seconds((1,), 1))
    ones = [seconds((zero,), 16) for zero in range(4)]
    assert ones[3] > 1.1 * min(ones[1:3])
    assert seconds((0, 1, 2, 3), 16) <= min(ones) * (1 + 1e-6)
