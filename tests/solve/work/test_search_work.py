"""What the search does not do: problems solved and frontiers made are counted, since seconds say little on a busy machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from support.models.solver_graphs import llama_graph

import autopar.solve.bounds.memory_frontier as frontiers
import autopar.solve.pipeline.stage_placement as stage_placement
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Precision
from autopar.rules.registry import default_registry
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.linear_model import LinearModel, Outcome, Status
from autopar.solve.ilp.memory_events import add_memory_constraint
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.ilp.solver_call import SolverName
from autopar.solve.search import search
from autopar.solve.search_state import SearchPoint, SearchState
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.meshes import mesh_of, meshes
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables

BF16 = Precision("bfloat16", "float32")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    out: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        original = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            out[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(stage_placement, "fastest_sharding")
    counted(stage_placement, "with_less_memory")
    counted(frontiers, "decode")
    counted(MeshSolver, "solve_with_memory")
    counted(MeshSolver, "relax_with_memory")
    return out


def test_pipelines_that_bound_and_bubble_prune_are_not_placed(counts: Counter[str]) -> None:
    """Llama's 32 layers on eight nodes: FSDP is best, and is known before pipelines are looked at."""
    found = search(llama_graph(layers=32, batch=128), Cluster.parse("dgx-h100:8"), SearchOptions(precision=BF16))
    assert found.candidate.pipeline.stages == 1
    assert counts["fastest_sharding"] <= 6
    assert counts["with_less_memory"] <= 2
    assert counts["solve_with_memory"] + counts["relax_with_memory"] <= 8


def test_orders_of_two_axes_inside_a_node_are_one_mesh() -> None:
    sizes = [mesh.sizes[1:] for mesh in meshes(16, 16, {}, 8) if len(mesh.axes) == 3]
    assert (4, 2) in sizes and (2, 4) not in sizes
    assert {(2, 8), (8, 2), (4, 4)} <= set(sizes)  # over two nodes they are two mappings onto the links
    assert (2, 4) in [mesh.sizes[1:] for mesh in meshes(16, 16, {"tp": 2, "tp2": 4}, 8)]


def _problem():
    graph, cluster, options = llama_graph(layers=4, batch=32), Cluster.parse("dgx-h100:4"), SearchOptions(precision=BF16)
    return ProblemTables(graph, cluster, options, default_registry()).problem(GridPoint(mesh_of(4, 8)))


def _memory_model():
    form = formulate(_problem(), recompute=True)
    add_memory_constraint(form)
    return form.model


def test_a_program_under_memory_is_relaxed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relaxation is not solved again, and the plan is the same."""
    monkeypatch.setattr(ilp, "_LARGE_MODEL", 1)
    problem, programs = _problem(), list[bool]()
    call = ilp.call_solver

    def counted(model: LinearModel, name: SolverName, relaxed: bool, *rest: Any) -> Outcome | None:
        programs.append(relaxed)
        return call(model, name, relaxed, *rest)

    monkeypatch.setattr(ilp, "call_solver", counted)
    alone, relaxed_first = (MeshSolution(GridPoint(problem.mesh)) for _ in range(2))
    MeshSolver(problem.graph, problem, (), 1e-4, alone).solve_with_memory(60.0)
    usual = list(programs)
    solver = MeshSolver(problem.graph, problem, (), 1e-4, relaxed_first)
    assert solver.relax_with_memory(60.0) is not None
    solver.solve_with_memory(60.0)
    assert any(usual), "a relaxation is solved"
    assert programs[len(usual) :] == usual
    assert relaxed_first.step_seconds == pytest.approx(alone.step_seconds)


def test_a_point_above_the_cutoff_keeps_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ilp, "_LARGE_MODEL", 1)
    problem = _problem()
    solved, cut = (MeshSolution(GridPoint(problem.mesh)) for _ in range(2))
    MeshSolver(problem.graph, problem, (), 1e-4, solved).solve_with_memory(60.0)
    assert solved.step_seconds is not None
    MeshSolver(problem.graph, problem, (), 1e-4, cut).solve_with_memory(60.0, cutoff_seconds=0.5 * solved.step_seconds)
    assert cut.status is Status.PRUNED and cut.step_seconds is None
    assert 0.5 * solved.step_seconds < cut.bound_seconds <= solved.step_seconds * (1 + 1e-6) < inf


@pytest.mark.parametrize(("best", "pruned"), [((16, 4), True), ((8, 4, 2), False)])
def test_two_model_axes_must_pay_only_beside_plans_of_fewer(best: tuple[int, ...], pruned: bool) -> None:
    """A bound 1 % below the best plan, on two model axes."""
    cluster, options = Cluster.parse("dgx-h100:8"), SearchOptions(precision=BF16)
    state = SearchState(llama_graph(layers=2, batch=64), cluster, options, lambda line: None)
    found = price_configuration(state.graph, cluster, FixedConfiguration(zero=3, precision=BF16), default_registry()).solutions[0]
    state.best = replace(found, point=GridPoint(mesh_of(*best)))
    point = SearchPoint(MeshSolution(GridPoint(mesh_of(16, 2, 2)), bound_seconds=0.99 * state.best_seconds()))
    assert state.is_pruned(point) == pruned
    one = SearchPoint(MeshSolution(GridPoint(mesh_of(16, 4)), bound_seconds=0.99 * state.best_seconds()))
    assert not state.is_pruned(one)


def test_bounds_of_wide_meshes_are_tightened_where_the_certificate_needs_it() -> None:
    """Two model axes have to be worth more than `indifference`; their bounds do not become the certificate's gap."""
    graph, cluster = llama_graph(layers=32, batch=16), Cluster.parse("dgx-h100:2")
    gaps = [search(graph, cluster, SearchOptions(precision=BF16, force={"pp": 1}, indifference=each)).gap for each in (0.0, 0.02)]
    assert gaps[1] <= gaps[0] + 1e-3
