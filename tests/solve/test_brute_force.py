"""The ILP against exhaustion on seeded small graphs, SCIP against HiGHS, and the LP bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import drawn_graph, llama_graph
from support.oracles.brute_force import Exhaustion
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Precision
from autopar.ir.verify import verify_candidate
from autopar.rules.registry import default_registry
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.memory_events import add_memory_constraint
from autopar.solve.problem.problem import Problem, build_problem

FAST = Cluster.parse("dgx-h100:1")


def problem_of(graph, mesh: Mesh, cluster: Cluster, precision: Precision | None = None) -> Problem:
    return build_problem(graph, mesh, cluster, precision or Precision(), "adamw", default_registry())


def resized(size: int) -> Cluster:
    return replace(FAST, size=size)


@pytest.mark.parametrize("seed", range(10))
def test_one_axis_equals_exhaustion(seed: int) -> None:
    graph, mesh, cluster = drawn_graph(seed), mesh_of(dp=1, tp=4), resized(4)
    form = formulate(problem_of(graph, mesh, cluster))
    outcome = ilp.solve(form.model, relative_gap=1e-9)
    assert outcome.status is Status.OPTIMAL
    expected = Exhaustion(graph, mesh, cluster, Precision()).best_seconds()
    assert outcome.objective * form.second_unit == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", [2, 4])
def test_two_axes_equal_exhaustion(seed: int) -> None:
    graph, mesh, cluster = drawn_graph(seed, calls=1), mesh_of(dp=1, tp=2, tp2=2), resized(4)
    form = formulate(problem_of(graph, mesh, cluster))
    outcome = ilp.solve(form.model, relative_gap=1e-9)
    expected = Exhaustion(graph, mesh, cluster, Precision()).best_seconds()
    assert outcome.objective * form.second_unit == pytest.approx(expected, rel=1e-6)
    candidate = decode(form, outcome.values)
    verify_candidate(graph, candidate, 4)
    assert evaluate(graph, candidate, cluster).step_seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("axes", [dict(dp=2, tp=4), dict(dp=1, tp=8)])
def test_scip_agrees_with_highs(axes: dict[str, int]) -> None:
    graph = gpt2_graph(layers=2)
    form = formulate(problem_of(graph, mesh_of(**axes), FAST))
    highs, scip = (ilp.solve(form.model, solver=name, relative_gap=1e-7) for name in ("highs", "scip"))
    assert highs.status is scip.status is Status.OPTIMAL
    assert highs.objective == pytest.approx(scip.objective, rel=1e-5)


def test_root_gap_of_a_llama_block_on_8_x_4() -> None:
    graph, cluster = llama_graph(layers=4), Cluster.parse("dgx-h100:4")
    form = formulate(problem_of(graph, mesh_of(dp=1, tp=8, tp2=4), cluster, Precision("bfloat16", "float32")))
    root = ilp.solve(form.model, relaxed=True)
    whole = ilp.solve(form.model)
    assert whole.status is Status.OPTIMAL
    assert 0.98 * whole.objective <= root.objective <= whole.objective * (1 + 1e-6)


@pytest.mark.parametrize("graph", [gpt2_graph, llama_graph])
def test_size_does_not_grow_with_depth(graph) -> None:
    sizes = set()
    for layers in (4, 32):
        form = formulate(problem_of(graph(layers=layers), mesh_of(dp=2, tp=4), FAST))
        before = form.model.variables, form.model.constraints
        add_memory_constraint(form)
        sizes.add((*before, form.model.variables, form.model.constraints))
    assert len(sizes) == 1


def test_infeasible_and_timeout_are_told_apart() -> None:
    form = formulate(problem_of(llama_graph(layers=2), mesh_of(dp=1, tp=4, tp2=2), FAST))
    assert ilp.solve(form.model, time_limit_seconds=0.05).status in (Status.TIMEOUT, Status.FEASIBLE)
    form.model.row([(form.x["Prologue", "hidden"][0], 1.0)], 2.0, 2.0)
    assert ilp.solve(form.model).status is Status.INFEASIBLE
