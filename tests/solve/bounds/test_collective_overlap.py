"""Collectives of a compiled backward that run beside gradients of weights: the program against the evaluator, the evaluator by
hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.solver_graphs import llama_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.call_trace import CallTrace, costs_as_run
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.plan import Candidate, Precision
from autopar.rules.registry import default_registry
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.problem.problem import Problem, build_problem

BF16 = Precision("bfloat16", "float32")
LAYER = "LlamaDecoderLayer"


def compiled(contention: float = 0.0) -> Cluster:
    cluster = with_compilation(Cluster.parse("dgx-h100:1"), True)
    return replace(cluster, overlap=replace(cluster.overlap, contention=contention))


def problem_of(cluster: Cluster, **axes: int) -> Problem:
    return build_problem(llama_graph(), mesh_of(**axes), cluster, BF16, "adamw", default_registry())


def solved(problem: Problem) -> tuple[float, Candidate]:
    form = formulate(problem)
    outcome = ilp.solve(form.model, relative_gap=1e-9)
    return outcome.objective * form.second_unit, decode(form, outcome.values)


@pytest.mark.parametrize("contention", [0.0, 0.3])
@pytest.mark.parametrize("axes", [dict(dp=1, tp=8), dict(dp=2, tp=4), dict(dp=1, tp=4, tp2=2)])
def test_the_program_has_the_evaluators_price(axes: dict[str, int], contention: float) -> None:
    problem = problem_of(compiled(contention), **axes)
    seconds, candidate = solved(problem)
    step = evaluate(problem.graph, candidate, problem.cluster)
    assert seconds == pytest.approx(step.step_seconds, rel=1e-6)
    for seed in range(20):
        drawn = drawn_candidate(problem.graph, problem.mesh, seed, zero=0, wild=0.5, precision=BF16)
        assert seconds <= evaluate(problem.graph, drawn, problem.cluster).step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_exposed_seconds_by_hand(contention: float) -> None:
    """A column-parallel product computes the gradient of its input, then sends that while it computes the gradient of its
    weight."""
    problem = problem_of(compiled(contention), dp=1, tp=8)
    plan = solved(problem)[1].block(LAYER)
    costs = problem.blocks[LAYER].costs
    exposed = hidden = 0.0
    for each in plan.conversions:
        cost = costs.conversion(each.value, each.source, each.target)
        readers = [node for node in plan.nodes if costs.nodes[node.node].operands()[:1] == (each.value,)]
        products = [node for node in readers if costs.nodes[node.node].op == "aten.linear" and node.operands[0] == each.target]
        beside = sum(costs.node(node).backward_seconds / 2 for node in products)
        less = min(cost.backward_comm_seconds * (1 - contention), beside)
        exposed += cost.forward_comm_seconds + cost.backward_comm_seconds - less
        hidden += less
    assert hidden > 0.05 * exposed
    assert sum(CallTrace.of(costs, plan).exposed_axis_seconds) == pytest.approx(exposed)
    delayed, eager = costs_as_run(costs, plan, split_backward=True), costs.eager
    assert sum(CallTrace.of(delayed, plan).exposed_axis_seconds) == pytest.approx(exposed + hidden)
    assert sum(CallTrace.of(eager, plan).exposed_axis_seconds) == pytest.approx(exposed + hidden)
